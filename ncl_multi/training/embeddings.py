"""Learning from embeddings only: which rows belong together, and the loss of a batch of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.head import axes_both_ways, k_means, top_k
from ncl_multi.losses import imitation_and_contrast, info_nce
from ncl_multi.training.neighbours import Neighbours

Rows = Int[Tensor, " n"]
Embeddings = Float[Tensor, "n width"]
_STARTED_ON = 8192
"""Rows that the start of the dimensions is computed from."""
_ROWS_PER_CLUSTER = 3
"""With fewer, a dimension would start on a single row."""
_DROPOUT = 0.5
"""Share of the embeddings of two sides that is dropped in training."""
_CLUSTER_LENGTH = 0.5
"""Of dimensions that start on clusters; with 1 they would leave few entries to the axes."""


@runtime_checkable
class Partners(Protocol):
    """Positives: for each of these rows another row that belongs to it."""

    def of(self, rows: Tensor) -> Tensor: ...


class SameGroup:
    """For each row another row of its group, drawn at random; itself if the group has one row.

    Example:
        >>> SameGroup(torch.tensor([3, 8, 3])).of(torch.tensor([0, 1, 2]))
        tensor([2, 1, 0])
    """

    def __init__(self, groups: Rows):
        number = groups.unique(return_inverse=True)[1]
        self.order = number.argsort(stable=True)
        self.size = torch.bincount(number)[number]
        first = torch.bincount(number).cumsum(0)[number] - self.size
        self.first = first
        self.place = torch.empty_like(self.order)
        self.place[self.order] = torch.arange(len(groups))

    def of(self, rows: Rows) -> Rows:
        """A draw for each of these rows."""
        size, first = self.size[rows], self.first[rows]
        # One to size - 1 places further, around the end of the group.
        step = 1 + (torch.rand(len(rows)) * (size - 1).clamp_min(1)).long()
        return self.order[first + (self.place[rows] - first + step) % size]


class Examples(NamedTuple):
    """Training data: embeddings in memory, and which of their rows belong together.

    `rows` are examples: a row of the first side and, if `partners` is None, the row of the last
    side that belongs to it. Rows of the first side with equal `groups` are not rivals.
    `numbers` are the numbers of the first side's rows in the whole data.
    """

    rows: Int[Tensor, "m columns"]
    sides: list[Tensor]
    partners: Partners | None
    groups: Tensor
    numbers: np.ndarray


def read_examples(
    sides: Sequence[Any], positives: Any, groups: Any, *, neighbours: int, max_rows: int
) -> Examples:
    """At most `max_rows` examples, drawn at random, with embeddings of their rows only.

    Args:
        sides: The embeddings, of one space or of two, as `ncl_multi.data.shards` reads them.
        positives: Pairs of row numbers, embeddings of each row's partner, or None.
        groups: A label per row, or None.
        neighbours: Without either, partners are drawn from this many nearest rows.
        max_rows: How many examples to take.
    """
    count = len(sides[0])
    if count < 2:
        raise ValueError(f"codes are learnt from at least 2 rows; got n_samples = {count}")
    if positives is not None and groups is not None:
        raise ValueError("give positives or groups, not both")
    pairs, partner = None, list(sides)[1:]
    if positives is not None:
        partners = np.asarray(positives) if not hasattr(positives, "blocks") else positives
        if getattr(partners, "dtype", np.dtype(float)).kind in "iu":
            pairs = _checked_pairs(partners, count, len(sides[-1]))
        elif partner:
            raise ValueError("with other, positives are pairs of row numbers of shape (m, 2)")
        else:
            partner = [type(sides[0])(partners)]
            if partner[0].shape != sides[0].shape:
                raise ValueError(
                    f"positives must have the shape of the embeddings, {sides[0].shape}; got "
                    f"{partner[0].shape}"
                )
    if partner and pairs is None and len(partner[0]) != count:
        raise ValueError(
            f"row i of one side belongs to row i of the other; got {count} and "
            f"{len(partner[0])} rows. Give positives as pairs of row numbers"
        )
    drawn = _draw(count if pairs is None else len(pairs), max_rows)
    if pairs is None:
        numbers, rows = drawn, torch.arange(len(drawn))[:, None]
    else:
        numbers, left = np.unique(pairs[drawn, 0], return_inverse=True)
        second, right = np.unique(pairs[drawn, 1], return_inverse=True)
        if not partner:
            numbers = np.union1d(numbers, second)
            left, right = (np.searchsorted(numbers, pairs[drawn, side]) for side in (0, 1))
        rows = torch.from_numpy(np.stack([left, right], axis=1))
    x = torch.from_numpy(sides[0].take(numbers))
    whole = [x]
    if partner:
        whole.append(torch.from_numpy(partner[0].take(numbers if pairs is None else second)))
        rows = rows.expand(-1, 2) if pairs is None else rows
    if groups is not None:
        labels = np.asarray(groups)
        if labels.shape != (count,):
            raise ValueError(f"expected one group per row, {count}; got the shape {labels.shape}")
        # NaN is not equal to itself.
        without = [
            row for row, group in enumerate(labels.tolist()) if group is None or group != group
        ]
        if without:
            raise ValueError(f"every row needs a group; row {without[0]} has none")
        kinds = torch.from_numpy(np.unique(labels[numbers], return_inverse=True)[1])
        return Examples(rows, whole, None if partner else SameGroup(kinds), kinds, numbers)
    near = Neighbours(unit_embeddings(x), neighbours) if pairs is None and not partner else None
    return Examples(rows, whole, near, same_rows(x), numbers)


@torch.no_grad()
def start_heads(heads: Any, data: Examples) -> None:
    """Let dimensions start on what the embeddings are made of; those of two sides on pairs.

    Clusters fire for rows of one kind, which is what few entries need. Axes, a dimension for either
    direction, hold what clusters leave out, which is what many entries add; they take at most half
    of the dimensions. If there are few rows, the last dimensions start at random. Two heads start
    on the halves of clusters of partners side by side, so that from the first step a dimension
    fires for the same things on both sides.
    """
    drawn = torch.from_numpy(_draw(len(data.rows), _STARTED_ON))
    sides = [
        unit_embeddings(side[rows[drawn]])
        for side, rows in zip(data.sides, data.rows.T, strict=False)
    ][: len(heads)]
    means = [x.mean(dim=0) for x in sides]
    around = [x - mean for x, mean in zip(sides, means, strict=True)]
    both = [F.normalize(x, dim=1) for x in around]
    dims, count, width = heads[0].out_dim, *sides[0].shape
    if len(heads) == 1:
        axes = axes_both_ways(around[0])[: min(2 * width, dims // 2)]
        centres = k_means(both[0], min(dims - len(axes), -(-count // _ROWS_PER_CLUSTER)))
        heads[0].start_at(torch.cat([F.normalize(centres, dim=1), axes]), plain=True)
        heads[0].out.weight[: len(centres)] *= _CLUSTER_LENGTH
    else:
        centres = k_means(torch.cat(both, dim=1), dims)
        for head, starts in zip(
            heads, centres.split([x.shape[1] for x in both], dim=1), strict=True
        ):
            head.start_at(starts, plain=True)
    for head, mean in zip(heads, means, strict=True):
        # The mean is common to all rows, so it is removed.
        head.out.bias.copy_(-(head.out.weight @ mean))


class EmbeddingObjective(nn.Module):
    """Partners get similar codes, and codes keep the similarities of their embeddings.

    Each step cuts codes to one of several numbers of entries. Anchors are compared with partners
    twice: both cut, and with whole anchors, as for a fuller query and a short document. `info_nce`
    finds the partner; `imitation` keeps the other similarities of the embeddings.

    Embeddings of two spaces have no cosine. There cut codes imitate the whole ones, whole anchors
    are compared with whole partners, and half of what a row differs from the mean is dropped.

    Args:
        model: The head of the anchors and, if partners come from another space, of the partners.
        data: Which rows belong together.
        ks: Numbers of entries to train for.
        temperature: Temperature of both terms; a low one considers only the nearest rows.
        imitation: Weight of the imitation term.
        noise: Length of the random vector that is added to each embedding, as a share of its own.
    """

    def __init__(
        self,
        model: nn.ModuleList,
        data: Examples,
        ks: Sequence[int],
        *,
        temperature: float,
        imitation: float,
        noise: float,
    ):
        super().__init__()
        self.model, self.data, self.ks = model, data, list(ks)
        self.temperature, self.imitation, self.noise = temperature, imitation, noise
        # One side has no dropout, and its unit rows would be a copy of all data.
        dropped = data.sides if len(model) > 1 else []
        self.means = [unit_embeddings(side).mean(dim=0) for side in dropped]

    def forward(self, batch: Int[Tensor, "n columns"]) -> tuple[Tensor, Tensor]:
        """The loss of these rows and of their partners, and their codes."""
        rows, device = batch.cpu(), batch.device
        anchors = rows[:, 0]
        others = rows[:, 1] if self.data.partners is None else self.data.partners.of(anchors)
        h = [
            unit_embeddings(side[numbers].to(device))
            for side, numbers in zip(
                (self.data.sides[0], self.data.sides[-1]), (anchors, others), strict=True
            )
        ]
        groups = self.data.groups[anchors].to(device)
        k = self.ks[int(torch.randint(len(self.ks), ()))]
        whole = self._codes(h)
        za, zb = (top_k(z, k) for z in whole)
        if len(self.model) == 1:
            total = self._loss((za, zb), h, groups) + self._loss((whole[0], zb), h, groups)
        else:
            contrast = info_nce(*whole, temperature=self.temperature, groups=groups)
            total = self._loss((za, zb), whole, groups) + contrast
        return total * self.weight(k) / 2, whole[0]

    def _loss(self, z: tuple[Tensor, Tensor], teacher: Sequence[Tensor], groups: Tensor) -> Tensor:
        """`info_nce` and the divergence of the codes' similarities from the teacher's."""
        unlike, contrast = imitation_and_contrast(
            z, (teacher[0], teacher[1]), self.temperature, groups=groups
        )
        return contrast + self.imitation * unlike

    def weight(self, k: int) -> float:
        """Weight of a step with k entries: a small k has the most to learn. One on average."""
        return len(self.ks) / k / sum(1 / other for other in self.ks)

    def _codes(self, h: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(self.model) > 1:
            # Without it heads on few pairs learn the pairs by heart.
            h = [
                mean.to(x) + F.dropout(x - mean.to(x), _DROPOUT)
                for x, mean in zip(h, self.means, strict=True)
            ]
        noisy = [x + self.noise * torch.randn_like(x) / x.shape[1] ** 0.5 for x in h]
        if len(self.model) == 1:
            return self.model[0](torch.cat(noisy)).split(len(noisy[0]))
        return [head(x) for head, x in zip(self.model, noisy, strict=True)]


def _checked_pairs(pairs: np.ndarray, first: int, second: int) -> np.ndarray:
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs):
        raise ValueError(f"pairs of row numbers have the shape (m, 2); got {pairs.shape}")
    bad = np.flatnonzero((pairs < 0).any(axis=1) | (pairs >= (first, second)).any(axis=1))
    if len(bad):
        raise ValueError(
            f"pairs must be rows below {first} and {second}; pair {bad[0]} is "
            f"{pairs[bad[0]].tolist()}"
        )
    return pairs


def _draw(count: int, most: int) -> np.ndarray:
    """Numbers below `count` in their order: all, or `most` of them at random."""
    if count <= most:
        return np.arange(count)
    seed = int(torch.randint(2**31 - 1, ()))
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))


def unit_embeddings(x: Embeddings) -> Embeddings:
    """Rows of length one, whatever their size: squares of small or large numbers are not finite.

    Example:
        >>> unit_embeddings(torch.tensor([[3e-30, 4e-30], [3e30, 4e30], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    largest = x.abs().amax(dim=1, keepdim=True)
    return F.normalize(x / torch.where(largest > 0, largest, 1.0), dim=1)


def same_rows(x: Embeddings) -> Rows:
    """A number for each row, the same for equal rows, which are not rivals.

    Example:
        >>> same_rows(torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]))
        tensor([1, 0, 1])
    """
    # -0 and 0 are equal, but their bytes are not.
    whole = (x + 0.0).contiguous().numpy()
    keys = whole.view(f"V{whole.dtype.itemsize * whole.shape[1]}").ravel()
    return torch.from_numpy(np.unique(keys, return_inverse=True)[1])
