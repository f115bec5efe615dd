"""Does search find the right items? Rankings by cosine, exact where scores tie.

Items with equal scores have no order, so every figure is the expected value over all orders of the
tied items. Sparse codes give scores of exactly 0: with this rule the order of the file does not
matter, and a query of zeros scores as well as chance. Scores are compared to six decimals, the
precision of a float32 product.

Right items are given as `relevant`: a sparse matrix (queries x items; entries above 0 are right,
and are the gains of nDCG), or two tensors of group ids (an item is right if its group is the
query's), or None if row i answers query i. With `items=None` the queries are searched among
themselves, each one left out of its own ranking; `relevant` may then be one tensor of group ids.
Queries without any right item are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from scipy.sparse import csr_array
from scipy.stats import rankdata
from torch import Tensor

from ncl_multi.metrics.codes import check_codes, dense, unit_rows

QueryCodes: TypeAlias = Float[Tensor, "queries d"] | csr_array
ItemCodes: TypeAlias = Float[Tensor, "items d"] | csr_array
Groups = Int[Tensor, " _"]
Relevance: TypeAlias = csr_array | tuple[Groups, Groups] | Groups | None

_SCORES_AT_ONCE = 2**22
_DECIMALS = 6


def ndcg_at_k(
    queries: QueryCodes, items: ItemCodes | None, relevant: Relevance = None, *, k: int = 10
) -> float:
    """Gain of the first k, each divided by log2(1 + rank), over that of the best order.

    Example:
        >>> ndcg_at_k(torch.eye(3), torch.eye(3), k=2)
        1.0
    """
    return retrieval(queries, items, relevant, ks=(k,))[f"ndcg@{k}"]


def mean_average_precision(
    queries: QueryCodes, items: ItemCodes | None, relevant: Relevance = None
) -> float:
    """Precision at the rank of each right item, averaged over them, over the whole ranking.

    Example:
        >>> mean_average_precision(torch.eye(3), torch.eye(3))
        1.0
    """
    return retrieval(queries, items, relevant, ks=(1,))["map"]


def retrieval(
    queries: QueryCodes,
    items: ItemCodes | None,
    relevant: Relevance = None,
    *,
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """All figures from one ranking: hit, recall, precision and nDCG at each k, mAP, median rank.

    `hit@k` is the share of queries with a right item among the first k, the R@k of image-text
    retrieval; `recall@k` the share of a query's right items among them, as text retrieval counts
    it. They agree where a query has one right item. `median_rank` is that of a query's best placed
    right item, counted from 1.

    Example:
        >>> figures = retrieval(torch.eye(3), torch.eye(3), ks=(1,))
        >>> figures["map"], figures["queries"]
        (1.0, 3)
    """
    per_query: dict[str, list[Tensor]] = {}
    for ranking in _rankings(queries, items, relevant, max(ks)):
        figures = {"map": ranking.average_precision(), "median_rank": ranking.first_rank()}
        for k in ks:
            figures |= {f"hit@{k}": ranking.hit(k), f"recall@{k}": ranking.recall(k)}
            figures |= {f"precision@{k}": ranking.precision(k), f"ndcg@{k}": ranking.ndcg(k)}
        for name, values in figures.items():
            per_query.setdefault(name, []).append(values)
    joined = {name: torch.cat(values) for name, values in per_query.items()}
    if not len(joined.get("map", ())):
        raise ValueError("no query has a right item; check the relevance that was given")
    means = {name: float(values.mean()) for name, values in joined.items()}
    means["median_rank"] = float(joined["median_rank"].quantile(0.5))
    return means | {"queries": len(joined["map"])}


def spearman(a: Shaped[Tensor, " n"], b: Shaped[Tensor, " n"]) -> float:
    """Correlation of ranks; equal values share their mean rank. 0 if one side is constant.

    Example:
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 8.0, 27.0])), 6)
        1.0
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(
            f"spearman needs two lists of equal length, at least 2; got {len(a)}, {len(b)}"
        )
    ranks = [rankdata(side.cpu().numpy()) for side in (a, b)]
    ranks = [side - side.mean() for side in ranks]
    length = np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum())
    return float((ranks[0] * ranks[1]).sum() / length) if length > 0 else 0.0


@dataclass(frozen=True)
class _Ranking:
    """Items of each query in order of score, described by place.

    Each place belongs to a block of tied items. `start`, `size` and `right` are the block's first
    place, its length and its number of right items; `before` the right items of earlier blocks;
    `gain` the block's mean gain; `ideal` the first gains of the best order.
    """

    start: Tensor
    size: Tensor
    right: Tensor
    before: Tensor
    gain: Tensor
    ideal: Tensor

    @property
    def chance(self) -> Tensor:
        """Probability that the item at a place is right."""
        return self.right / self.size

    @property
    def all_right(self) -> Tensor:
        return (self.before + self.right)[:, -1]

    def precision(self, k: int) -> Tensor:
        return self.chance[:, :k].sum(1) / k

    def recall(self, k: int) -> Tensor:
        return self.chance[:, :k].sum(1) / self.all_right

    def hit(self, k: int) -> Tensor:
        last = min(k, self.size.shape[1]) - 1
        size, right = self.size[:, last], self.right[:, last]
        drawn = last + 1 - self.start[:, last]
        # None of the drawn is right: C(wrong, drawn) / C(size, drawn).
        wrong = size - right
        log_none = (
            torch.lgamma(wrong + 1)
            - torch.lgamma((wrong - drawn).clamp(min=0) + 1)
            - torch.lgamma(size + 1)
            + torch.lgamma(size - drawn + 1)
        )
        none = torch.where(drawn > wrong, 0.0, log_none.exp())
        return torch.where(self.before[:, last] > 0, 1.0, 1 - none)

    def ndcg(self, k: int) -> Tensor:
        places = torch.arange(self.gain.shape[1], device=self.gain.device, dtype=torch.float64)
        discount = 1 / torch.log2(places[:k] + 2)
        return (self.gain[:, :k] * discount).sum(1) / (self.ideal[:, :k] * discount).sum(1)

    def average_precision(self) -> Tensor:
        place = torch.arange(self.size.shape[1], device=self.size.device)
        earlier_in_block = (place - self.start) * (self.right - 1) / (self.size - 1).clamp(min=1)
        precision = (self.before + 1 + earlier_in_block) / (place + 1)
        return (self.chance * precision).sum(1) / self.all_right

    def first_rank(self) -> Tensor:
        first = ((self.before == 0) & (self.right > 0)).double().argmax(1, keepdim=True)
        start, size, right = (x.gather(1, first) for x in (self.start, self.size, self.right))
        return (start + (size + 1) / (right + 1))[:, 0]


def _rankings(
    queries: QueryCodes, items: ItemCodes | None, relevant: Relevance, most: int
) -> Iterator[_Ranking]:
    check_codes(queries)
    if most < 1:
        raise ValueError(f"k must be at least 1; got {most}")
    among_themselves = items is None
    answers = queries if items is None else items
    check_codes(answers)
    if queries.shape[1] != answers.shape[1]:
        raise ValueError(
            f"queries and items must be equally wide; got {queries.shape[1]} and {answers.shape[1]}"
        )
    rows, columns = queries.shape[0], answers.shape[0]
    if among_themselves and columns < 2:
        raise ValueError("a search of rows among themselves needs at least two rows; got 1")
    gains_of = _gains(relevant, rows, columns, among_themselves)
    scores_of = _scores(unit_rows(queries), unit_rows(answers))
    for chunk in torch.arange(rows).split(max(1, _SCORES_AT_ONCE // columns)):
        gains = gains_of(chunk)
        scores = scores_of(chunk)
        gains = gains.to(scores.device)
        if among_themselves:
            other = torch.ones_like(scores, dtype=torch.bool)
            other[torch.arange(len(chunk)), chunk] = False
            scores, gains = (x[other].view(len(chunk), columns - 1) for x in (scores, gains))
        answered = (gains > 0).any(1)
        if answered.any():
            yield _rank(scores[answered], gains[answered], most)


def _rank(scores: Float[Tensor, "queries items"], gains: Tensor, most: int) -> _Ranking:
    scores, order = scores.mul(10**_DECIMALS).round().sort(dim=1, descending=True)
    sorted_gains = gains.gather(1, order)
    n = scores.shape[1]
    place = torch.arange(n, device=scores.device)
    breaks = scores[:, 1:] != scores[:, :-1]
    edge = torch.ones_like(scores[:, :1], dtype=torch.bool)
    opens, closes = torch.cat([edge, breaks], dim=1), torch.cat([breaks, edge], dim=1)
    start = torch.where(opens, place, 0).cummax(1).values
    end = torch.where(closes, place, n).flip(1).cummin(1).values.flip(1) + 1

    def block_sums(values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums before each place's block, and within it."""
        sums = torch.cat([torch.zeros_like(values[:, :1]), values.cumsum(1)], dim=1)
        before = sums.gather(1, start)
        return before, sums.gather(1, end) - before

    before, right = block_sums((sorted_gains > 0).double())
    size = (end - start).double()
    return _Ranking(
        start=start.double(),
        size=size,
        right=right,
        before=before,
        gain=block_sums(sorted_gains)[1] / size,
        ideal=gains.topk(min(most, n), dim=1).values,
    )


def _scores(queries: QueryCodes, items: ItemCodes) -> Callable[[Tensor], Tensor]:
    """Cosines of a chunk of queries to all items; sparse products if both sides are sparse."""
    if not isinstance(queries, Tensor) and not isinstance(items, Tensor):
        columns = items.T.tocsr()
        return lambda chunk: torch.from_numpy((queries[chunk.numpy()] @ columns).toarray())
    left, right = dense(queries), dense(items)
    return lambda chunk: left[chunk] @ right.T


def _gains(
    relevant: Relevance, queries: int, items: int, among_themselves: bool
) -> Callable[[Tensor], Tensor]:
    """A function from query numbers to their gains over all items."""
    if isinstance(relevant, Tensor):
        if not among_themselves:
            raise ValueError(
                "one list of groups is enough only for a search with items=None; "
                "give (query_groups, item_groups)"
            )
        relevant = (relevant, relevant)
    if not isinstance(relevant, tuple) and relevant is not None:
        if relevant.shape != (queries, items):
            raise ValueError(
                f"relevant must be queries x items, {(queries, items)}; got {relevant.shape}"
            )
        judged = csr_array(relevant)
        return lambda chunk: torch.from_numpy(judged[chunk.numpy()].toarray()).double()
    if relevant is None:
        if among_themselves or queries != items:
            raise ValueError(
                f"without `relevant`, row i must answer query i: got {queries} queries and "
                f"{'no' if among_themselves else items} items. Give groups or a sparse matrix"
            )
        relevant = (torch.arange(queries), torch.arange(items))
    of_query, of_item = (groups.cpu() for groups in relevant)
    if len(of_query) != queries or len(of_item) != items:
        raise ValueError(
            f"expected one group per row: {queries} queries and {items} items, got "
            f"{len(of_query)} and {len(of_item)}"
        )
    return lambda chunk: (of_query[chunk, None] == of_item).double()
