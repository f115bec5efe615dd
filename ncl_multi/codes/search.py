"""An exact search index for sparse non-negative codes: inverted lists, no server.

An item can only match where it shares an active dimension, so a query reads only the lists of its
own few dimensions. For more than one machine, see the exports to engines in
`ncl_multi.codes.engines`.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from scipy.sparse import csr_array, hstack, vstack

from ncl_multi.codes.explain import unit_csr
from ncl_multi.codes.features import MOST_COLUMNS, from_metadata, to_metadata
from ncl_multi.codes.inverted import MOST_ITEMS, Block, scan
from ncl_multi.files import atomic, check_keys, read_safetensors

FORMAT = "ncl_multi.index/1"


class SparseIndex:
    """Codes to search by cosine similarity, exactly.

    Codes are brought to unit length when they are added, so a score is the sum of the shares that
    `explain` returns. An item is found only if it shares an active dimension with the query; one
    without active dimensions is stored, but never found.

    Args:
        dims: Width of the codes.
        names: A name for each dimension, for `why`; saved with the index.

    Example:
        >>> index = SparseIndex(3)
        >>> index.add([7, 8], np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
        >>> ids, scores = index.search(np.array([[1.0, 0.0, 0.0]]), k=2)
        >>> ids, scores.round(3)
        (array([[ 7, -1]]), array([[0.707, 0.   ]], dtype=float32))
    """

    def __init__(self, dims: int, names: Sequence[str] | None = None):
        if not 1 <= dims <= MOST_COLUMNS:
            raise ValueError(f"dims must be at least 1 and at most {MOST_COLUMNS}; got {dims}")
        if names is not None and len(names) != dims:
            raise ValueError(f"expected one name per dimension, {dims}; got {len(names)}")
        self.dims = dims
        self.names = None if names is None else list(names)
        self._blocks: list[Block] = []
        # Additions are collected here, so that many small ones cost as little as one large one.
        self._waiting: list[tuple[np.ndarray, csr_array]] = []
        self._waiting_ids: set[int] = set()
        self._rarity: np.ndarray | None = None

    def __len__(self) -> int:
        return sum(int(block.live.sum()) for block in self._blocks) + len(self._waiting_ids)

    @property
    def ids(self) -> np.ndarray:
        """The ids in the index."""
        self._settle()
        return np.concatenate([np.empty(0, np.int64), *(b.ids[b.live] for b in self._blocks)])

    @property
    def nbytes(self) -> int:
        """Memory of the index in bytes."""
        self._settle()
        return sum(
            array.nbytes
            for block in self._blocks
            for array in (*block.tensors().values(), block.order)
        )

    def add(self, ids: Sequence[int] | np.ndarray, codes: Any) -> None:
        """Add codes, one row per id. Ids are whole numbers from 0 and must be new."""
        numbers, z = _numbers(ids), self._rows(codes)
        if len(numbers) != z.shape[0]:
            raise ValueError(f"expected one id per code; got {len(numbers)} for {z.shape[0]} codes")
        unique, counts = np.unique(numbers, return_counts=True)
        stored_ids = unique[(self._find(unique) >= 0).any(axis=0)] if self._blocks else unique[:0]
        again = [*unique[counts > 1].tolist(), *stored_ids.tolist()]
        again += self._waiting_ids.intersection(unique.tolist()) if self._waiting_ids else []
        if again:
            raise ValueError(f"ids must not repeat; got {again[:5]} again. Remove them first")
        self._waiting.append((numbers, z.astype(np.float32)))
        self._waiting_ids.update(numbers.tolist())

    def remove(self, ids: Sequence[int] | np.ndarray) -> None:
        """Remove items; their ids may be added again. On an error nothing is removed."""
        self._settle()
        numbers = np.unique(_numbers(ids))
        rows = self._find(numbers, required=True)
        self._rarity = None
        for place, block in enumerate(self._blocks):
            block.live[rows[place][rows[place] >= 0]] = False
        half_empty = [block for block in self._blocks if 2 * block.live.sum() < len(block.live)]
        self._blocks = [block for block in self._blocks if block not in half_empty]
        for block in half_empty:
            if block.live.any():
                self._append(block.ids[block.live], csr_array(block.lists()[:, block.live]))

    def search(
        self,
        codes: Any,
        k: int = 10,
        *,
        within: Sequence[int] | np.ndarray | None = None,
        idf: bool = False,
        threads: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k items of highest cosine similarity for each query, best first.

        If fewer than k items have a positive score, other ids are -1 with score 0.

        Args:
            codes: One query or rows of queries. Entries may be negative: dimensions that count
                against an item.
            k: Number of items for each.
            within: Search only these ids: a filter.
            idf: Weigh the entries of a query by how rare a dimension is among the items, as words
                are in BM25: log((1 + items) / (1 + items with the dimension)) + 1.
            threads: Queries searched in parallel; all cores by default.

        Returns:
            Ids and scores, one row per query.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1; got {k}")
        self._settle()
        if not any(block.live.any() for block in self._blocks):
            raise ValueError("the index is empty: add codes before searching")
        z = self._rows(codes, signed=True)
        empty = np.flatnonzero(np.diff(z.indptr) == 0)
        if len(empty):
            raise ValueError(
                f"a query of zeros matches nothing; got zeros in rows {empty[:5].tolist()}. "
                f"A wider head, or a higher density or k, leaves no item without features"
            )
        if idf:
            z = unit_csr(z.multiply(self._idf()), signed=True)
        query = (z.indptr.astype(np.int64), z.indices.astype(np.int64), z.data.astype(np.float32))
        allowed = self._allowed(within)
        scores = np.zeros((z.shape[0], k), np.float32)
        places = np.full((z.shape[0], k), -1, np.int64)
        threads = min(threads or os.cpu_count() or 1, z.shape[0])
        edges = np.linspace(0, z.shape[0], threads + 1).astype(int).tolist()

        def look_up(start: int, end: int) -> None:
            first = 0
            for block, mask in zip(self._blocks, allowed, strict=True):
                lists = (block.starts, block.rows, block.values, mask)
                scan(*lists, *query, start, end, first, scores, places)
                first += len(block.ids)

        if threads == 1:
            look_up(0, z.shape[0])
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(look_up, edges[:-1], edges[1:]))
        order = np.lexsort((places, -scores), axis=1)
        scores, places = (np.take_along_axis(x, order, axis=1) for x in (scores, places))
        return self._ids_at(places), scores

    def codes(self, ids: Sequence[int] | np.ndarray) -> csr_array:
        """The codes of these ids, unit rows in the order given."""
        self._settle()
        numbers = _numbers(ids)
        result = csr_array((len(numbers), self.dims), dtype=np.float32)
        rows = self._find(numbers, required=True)
        for block, block_rows in zip(self._blocks, rows, strict=True):
            positions = np.flatnonzero(block_rows >= 0)
            unique, inverse = np.unique(block_rows[positions], return_inverse=True)
            spread = (np.ones(len(positions), np.float32), (positions, inverse))
            chosen = csr_array(spread, shape=(len(numbers), len(unique)))
            result = result + chosen @ block.codes(unique)
        return csr_array(result)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all."""
        self._settle()
        tensors = {
            f"{number}.{name}": array
            for number, block in enumerate(self._blocks)
            for name, array in block.tensors().items()
        }
        about = {"dims": self.dims, "names": self.names, "blocks": len(self._blocks)}
        metadata = to_metadata(FORMAT, about)
        with atomic(path) as unfinished:
            save_file(tensors, unfinished, metadata)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "SparseIndex":
        """Read a file written by `save`."""
        expected = {f"*.{name}": rule for name, rule in Block.PARTS.items()}
        try:
            tensors, metadata = read_safetensors(path, expected, framework="np", file_format=FORMAT)
        except FileNotFoundError:
            raise FileNotFoundError(f"no index at {path}; SparseIndex.save writes one") from None
        try:
            about = from_metadata(metadata)
            check_keys(about, ("dims", "names", "blocks"), (), "its provenance")
            dims, names, blocks = about["dims"], about["names"], about["blocks"]
            if type(dims) is not int or type(blocks) is not int:
                raise ValueError(f"dims and blocks must be whole numbers; got {dims} and {blocks}")
            if not (names is None or (isinstance(names, list) and set(map(type, names)) <= {str})):
                raise ValueError("names must be a list of texts")
            if len(tensors) != blocks * len(Block.PARTS):
                raise ValueError(f"expected {blocks} blocks; got {len(tensors)} tensors")
            index = cls(dims, names)
            for number in range(blocks):
                parts = {name: tensors[f"{number}.{name}"] for name in Block.PARTS}
                index._blocks.append(Block(**parts).checked(index.dims))
            ids = index.ids
            if len(np.unique(ids)) != len(ids):
                raise ValueError("its ids must not repeat")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return index

    def _rows(self, codes: Any, *, signed: bool = False) -> csr_array:
        z = unit_csr(codes, signed=signed)
        if z.shape[1] != self.dims:
            raise ValueError(
                f"this index has codes of {self.dims} dimensions; got {z.shape[1]}. "
                f"Encode with the model that made the index"
            )
        z.eliminate_zeros()
        return z

    def _find(self, ids: np.ndarray, *, required: bool = False) -> np.ndarray:
        """One line per block: the row of each id in it, or -1."""
        # There may be none of either.
        shape = (len(self._blocks), len(ids))
        rows = np.array([block.find(ids) for block in self._blocks]).reshape(shape)
        unknown = ids[(rows < 0).all(axis=0)]
        if required and len(unknown):
            raise ValueError(f"the index does not contain {unknown[:5].tolist()}")
        return rows

    def _ids_at(self, places: np.ndarray) -> np.ndarray:
        """Ids of places counted through all blocks; -1 stays -1."""
        ids = np.full(places.shape, -1, np.int64)
        first = 0
        for block in self._blocks:
            in_block = (places >= first) & (places < first + len(block.ids))
            ids[in_block] = block.ids[places[in_block] - first]
            first += len(block.ids)
        return ids

    def _allowed(self, within: Sequence[int] | np.ndarray | None) -> list[np.ndarray]:
        """For each block, which rows a search may return."""
        if within is None:
            return [block.live for block in self._blocks]
        masks = [np.zeros(len(block.live), bool) for block in self._blocks]
        for mask, rows in zip(masks, self._find(_numbers(within)), strict=True):
            mask[rows[rows >= 0]] = True
        return masks

    def _idf(self) -> np.ndarray:
        """How rare each dimension is; kept until items are added or removed."""
        if self._rarity is None:
            active = np.zeros(self.dims, np.int64)
            for block in self._blocks:
                dims = np.repeat(np.arange(self.dims), np.diff(block.starts))
                active += np.bincount(dims[block.live[block.rows]], minlength=self.dims)
            self._rarity = (np.log((1 + len(self)) / (1 + active)) + 1).astype(np.float32)
        return self._rarity

    def _settle(self) -> None:
        """Move collected additions into blocks."""
        if self._waiting:
            self._rarity = None
            ids = np.concatenate([numbers for numbers, _ in self._waiting])
            z = vstack([codes for _, codes in self._waiting], format="csr")
            self._waiting, self._waiting_ids = [], set()
            self._append(ids, csr_array(z.T))

    def _append(self, ids: np.ndarray, lists: csr_array) -> None:
        """Add items as columns of inverted lists, filling up the last block first."""
        if self._blocks and len(self._blocks[-1].ids) < MOST_ITEMS:
            last = self._blocks.pop()
            ids = np.concatenate([last.ids[last.live], ids])
            lists = csr_array(hstack([last.lists()[:, last.live], lists]))
        for start in range(0, len(ids), MOST_ITEMS):
            block_lists = csr_array(lists[:, start : start + MOST_ITEMS])
            block_lists.sort_indices()
            block_ids = ids[start : start + MOST_ITEMS]
            self._blocks.append(
                Block(
                    ids=block_ids,
                    starts=block_lists.indptr.astype(np.int64),
                    rows=block_lists.indices.astype(np.uint16),
                    values=block_lists.data.astype(np.float32),
                    live=np.ones(len(block_ids), bool),
                )
            )


def _numbers(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    numbers = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise ValueError(
            f"ids must be a list of whole numbers; got {numbers.dtype} of shape {numbers.shape}"
        )
    numbers = numbers.astype(np.int64)
    if len(numbers) and numbers.min() < 0:
        raise ValueError(f"ids must be at least 0; got {numbers.min()}")
    return numbers
