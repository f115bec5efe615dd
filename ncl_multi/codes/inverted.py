"""Inverted lists: for each dimension, the items in which it is active."""

from dataclasses import dataclass
from inspect import unwrap
from typing import ClassVar

import numpy as np
from scipy.sparse import csr_array

from ncl_multi.files import Expected
from ncl_multi.optional import needs

with needs("ncl-multi[search]"):
    from numba import njit

MOST_ITEMS = 65_536
"""Most items of one block: their numbers fit 16 bits, and their scores a core's cache."""


@dataclass(eq=False)
class Block:
    """The lists of up to `MOST_ITEMS` items: list `d` is `rows[starts[d]:starts[d + 1]]`.

    `live` marks the rows that have not been removed.
    """

    PARTS: ClassVar = {
        "ids": Expected(("I64",)),
        "starts": Expected(("I64",)),
        "rows": Expected(("U16",)),
        "values": Expected(("F32",)),
        "live": Expected(("BOOL",)),
    }
    """The saved arrays, with the types that the compiled search requires."""

    ids: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    live: np.ndarray

    def __post_init__(self) -> None:
        self.order = np.argsort(self.ids, kind="stable").astype(np.uint16)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Row of each id, -1 if it is not in this block or was removed."""
        place = np.searchsorted(self.ids, ids, sorter=self.order)
        rows = self.order[np.minimum(place, len(self.ids) - 1)].astype(np.int64)
        return np.where((self.ids[rows] == ids) & self.live[rows], rows, -1)

    def lists(self) -> csr_array:
        """One row per dimension, one column per item."""
        shape = (len(self.starts) - 1, len(self.ids))
        return csr_array((self.values, self.rows.astype(np.int32), self.starts), shape=shape)

    def codes(self, rows: np.ndarray) -> csr_array:
        """The codes of these rows, each at most once, in the order given."""
        slot = np.full(len(self.ids), -1, np.int64)
        slot[rows] = np.arange(len(rows))
        entries = np.flatnonzero(slot[self.rows] >= 0)
        dims = np.searchsorted(self.starts, entries, side="right") - 1
        places = (slot[self.rows[entries]], dims)
        return csr_array((self.values[entries], places), shape=(len(rows), len(self.starts) - 1))

    def tensors(self) -> dict[str, np.ndarray]:
        """What is saved."""
        return {name: np.ascontiguousarray(getattr(self, name)) for name in self.PARTS}

    def checked(self, dims: int) -> "Block":
        """The block itself, after a check that its indices are valid."""
        lengths = (len(self.starts) - 1, len(self.values), len(self.live))
        sound = (
            0 < len(self.ids) <= MOST_ITEMS
            and lengths == (dims, len(self.rows), len(self.ids))
            and self.starts[0] == 0
            and self.starts[-1] == len(self.rows)
            and (np.diff(self.starts) >= 0).all()
            and (not len(self.rows) or self.rows.max() < len(self.ids))
            and np.isfinite(self.values).all()
            and (self.values >= 0).all()
            and self.live.view(np.uint8).max() <= 1
            and self.ids.min() >= 0
            and len(np.unique(self.ids)) == len(self.ids)
        )
        if not sound:
            raise ValueError("its inverted lists do not fit together")
        # Each list must contain an item once, or sums would count it twice.
        inside = np.ones(len(self.rows), bool)
        inside[self.starts[:-1][self.starts[:-1] < len(self.rows)]] = False
        if (np.diff(self.rows.astype(np.int32), prepend=-1)[inside] <= 0).any():
            raise ValueError("its inverted lists name an item twice")
        return self


def _scan(
    starts, rows, values, allowed, pointers, dims, weights, begin, end, first, scores, places
):
    """Merge one block's best items into each query's heap, whose root is its worst item."""
    total = np.zeros(len(allowed), np.float32)
    k = scores.shape[1]
    for query in range(begin, end):
        for at in range(pointers[query], pointers[query + 1]):
            weight = weights[at]
            for entry in range(starts[dims[at]], starts[dims[at] + 1]):
                total[rows[entry]] += weight * values[entry]
        heap, where = scores[query], places[query]
        for row in range(len(total)):
            score = total[row]
            total[row] = 0
            if score > heap[0] and allowed[row]:
                node = 0
                while True:
                    child = 2 * node + 1
                    if child >= k:
                        break
                    if child + 1 < k and heap[child + 1] < heap[child]:
                        child += 1
                    if heap[child] >= score:
                        break
                    heap[node], where[node] = heap[child], where[child]
                    node = child
                heap[node], where[node] = score, first + row


# In tests every function is wrapped in type checks, which numba cannot compile.
scan = njit(cache=True, nogil=True)(unwrap(_scan))
"""`_scan`, compiled."""
