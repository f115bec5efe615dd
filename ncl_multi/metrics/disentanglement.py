"""Information that only one dimension carries: SEPIN without labels; MIG, SAP, DCI with factors.

SEPIN brings rows to unit length; the measures with factors take codes as they are, because a
factor's value may be the size of an entry.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ncl_multi.metrics.codes import Codes, check_codes, dense, unit_rows
from ncl_multi.optional import needs

Convention = Literal["renormalised", "fixed"]
Factors = Int[Tensor, "n factors"]
PerFactor = Float[np.ndarray, "d factors"]

_BINS = 20
# Pairs of rows x dimensions at a time: they should fit a CPU's cache.
_PAIRS_AT_ONCE = 2**19
_LOWEST_TEMPERATURE = 0.025


def separability(
    za: Codes,
    zb: Codes | None = None,
    *,
    convention: Convention,
    temperature: float = 0.2,
    batch: int = 256,
    seed: int = 0,
) -> Float[Tensor, " d"]:
    """What only this dimension tells about the item: I(x; z) - I(x; z without it), in nats.

    Both terms are InfoNCE's bound, log(batch) - loss, with `batch` candidate rows, so the figure is
    the rise of the loss when the dimension is dropped. `zb` is another view of the same items;
    without one each row has to find itself. Rows are drawn into batches by `seed`.

    `fixed` brings rows to unit length once and then drops the dimension; `renormalised` brings
    them to unit length again. They differ by more than tenfold: never compare one to the other.

    Example:
        >>> scores = separability(torch.eye(4), convention="fixed", temperature=1.0)
        >>> [round(score, 4) for score in scores.tolist()]
        [0.1607, 0.1607, 0.1607, 0.1607]
    """
    if convention not in ("renormalised", "fixed"):
        raise ValueError(f"convention must be renormalised or fixed; got {convention!r}")
    if temperature < _LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature must be at least {_LOWEST_TEMPERATURE}, below which float32 has no "
            f"room for the sum; got {temperature}"
        )
    za = unit_rows(za)
    zb = za if zb is None else unit_rows(zb)
    if za.shape != zb.shape:
        raise ValueError(
            f"the two views must be of the same rows; got {tuple(za.shape)} and {tuple(zb.shape)}"
        )
    n, d = za.shape
    if n < 2 or batch < 2:
        raise ValueError(f"separability needs two rows in a batch; got {n} rows, batch={batch}")
    batch = min(batch, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    total = torch.zeros(d, dtype=torch.float64)
    batches = order[: n // batch * batch].view(-1, batch)
    for rows in batches:
        a, b = (dense(z[rows.numpy() if not isinstance(z, Tensor) else rows]) for z in (za, zb))
        total += _rise_of_loss(a.float(), b.float(), convention, temperature).cpu()
    return (total / len(batches)).float()


def sepin(
    za: Codes,
    zb: Codes | None = None,
    *,
    convention: Convention,
    ks: Sequence[int] = (1, 10, 100),
    temperature: float = 0.2,
    batch: int = 256,
    seed: int = 0,
) -> dict[str, float]:
    """SEPIN@k: `separability` of the k best dimensions, averaged; a k above the width is left out.

    Example:
        >>> scores = sepin(torch.eye(4), convention="fixed", ks=(1,), temperature=1.0)
        >>> [(name, round(score, 4)) for name, score in scores.items()]
        [('1', 0.1607), ('all', 0.1607)]
    """
    scores = separability(
        za, zb, convention=convention, temperature=temperature, batch=batch, seed=seed
    )
    best = scores.sort(descending=True).values
    by_k = {str(k): float(best[:k].mean()) for k in ks if k <= len(best)}
    return by_k | {"all": float(best.mean())}


def mutual_information(z: Codes, factors: Factors) -> PerFactor:
    """Mutual information, in nats, of each dimension (in 20 bins of equal width) and each factor.

    Example:
        >>> z = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> mutual_information(z, torch.tensor([[0], [1], [0], [1]])).round(4).tolist()
        [[0.6931], [0.6931]]
    """
    columns = []
    for joint in _joint_counts(z, factors):
        share = joint / joint[0].sum()
        alone = share.sum(2, keepdims=True) * share.sum(1, keepdims=True)
        ratio = np.divide(share, alone, out=np.ones_like(share), where=share > 0)
        columns.append((share * np.log(ratio)).sum((1, 2)))
    return np.stack(columns, axis=1)


def mig(z: Codes, factors: Factors) -> float:
    """Mutual information gap: best dimension minus second best, over the factor's entropy.

    Averaged over factors. A code that writes one factor into several dimensions scores low.

    Example:
        >>> factors = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        >>> round(mig(factors.float(), factors), 4)
        1.0
    """
    gaps = _gap(mutual_information(z, factors))
    entropy = []
    for factor in factors.T:
        share = factor.unique(return_counts=True)[1].double() / len(factor)
        entropy.append(float(-(share * share.log()).sum()))
    return float((gaps / np.maximum(entropy, 1e-12)).mean())


def sap(z: Codes, factors: Factors) -> float:
    """Attribute predictability gap: accuracy of the best single dimension minus the second best.

    A dimension guesses by the commonest value in each of its 20 bins (the original uses a linear
    SVM). Averaged over factors.

    Example:
        >>> factors = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        >>> sap(factors.float(), factors)
        0.5
    """
    accuracy = [joint.max(2).sum(1) / joint[0].sum() for joint in _joint_counts(z, factors)]
    return float(_gap(np.stack(accuracy, axis=1)).mean())


def dci(z: Codes, factors: Factors, *, trees: int = 50, seed: int = 0) -> dict[str, float]:
    """Disentanglement, completeness, informativeness from a random forest's importances.

    One forest per factor, fitted to three quarters of the rows. Disentanglement: does a dimension
    matter for one factor only? Completeness: does a factor need one dimension only?
    Informativeness: the forests' accuracy on the other rows.

    Example:
        >>> factors = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(10, 1)
        >>> scores = dci(factors.float(), factors)
        >>> scores["informativeness"], scores["disentanglement"] > 0.9
        (1.0, True)
    """
    with needs("ncl-multi[train]"):
        from sklearn.ensemble import RandomForestClassifier
    _check_factors(z, factors)
    rows, targets = dense(z).float().cpu().numpy(), factors.cpu().numpy()
    order = np.random.default_rng(seed).permutation(len(rows))
    train, test = order[: len(rows) * 3 // 4], order[len(rows) * 3 // 4 :]
    importance, accuracy = [], []
    # A split that cannot see the right dimension gives importance to a wrong one.
    looked_at = min(rows.shape[1], max(8, round(rows.shape[1] ** 0.5)))
    for target in targets.T:
        forest = RandomForestClassifier(
            trees, max_features=looked_at, min_samples_leaf=2, n_jobs=-1, random_state=seed
        )
        forest.fit(rows[train], target[train])
        importance.append(forest.feature_importances_)
        accuracy.append(forest.score(rows[test], target[test]))
    weights = np.stack(importance, axis=1)
    share = weights.sum(1) / max(weights.sum(), 1e-12)
    return {
        "disentanglement": float((share * _focus(weights)).sum()),
        "completeness": float(_focus(weights.T).mean()),
        "informativeness": float(np.mean(accuracy)),
    }


def _rise_of_loss(a: Tensor, b: Tensor, convention: Convention, temperature: float) -> Tensor:
    """InfoNCE without each dimension, minus InfoNCE with all."""
    scores = a @ b.T
    # A dimension silent in the whole batch changes nothing.
    used = ((a != 0) | (b != 0)).any(0).nonzero()[:, 0]
    columns = torch.stack([a.T, b.T], dim=1)[used]
    rise = torch.zeros(a.shape[1], dtype=torch.float64, device=a.device)
    baseline = _loss(scores[None], temperature)
    chunk = max(1, _PAIRS_AT_ONCE // scores.numel())
    for dims, pair in zip(used.split(chunk), columns.split(chunk), strict=True):
        left, right = pair[:, 0, :, None], pair[:, 1, None, :]
        without_dim = torch.baddbmm(scores.expand(len(dims), -1, -1), left, right, alpha=-1)
        if convention == "renormalised":
            without_dim.mul_(_inverse_rest(left)).mul_(_inverse_rest(right))
        rise[dims] = _loss(without_dim, temperature) - baseline
    return rise


def _inverse_rest(entry: Tensor) -> Tensor:
    """One over the length of a unit row without this entry; 0 if nothing is left."""
    squared = 1 - entry.square()
    return torch.where(squared > 1e-6, squared.clamp(min=1e-6).rsqrt(), 0)


def _loss(scores: Float[Tensor, "c n n"], temperature: float) -> Float[Tensor, " c"]:
    """InfoNCE of each matrix of cosines; no cosine exceeds 1, so nothing can overflow."""
    logits = scores.sub(1).div_(temperature)
    matches = logits.diagonal(dim1=1, dim2=2).double()
    # The rise is a millionth of the loss: float32 would be too coarse for the sums.
    return (logits.exp_().sum(2).double().log() - matches).mean(1)


def _joint_counts(z: Codes, factors: Factors) -> Iterator[Float[np.ndarray, "d bins values"]]:
    """Counts of each value in each bin of each dimension, one factor after another."""
    _check_factors(z, factors)
    rows = dense(z).float().cpu()
    low, high = rows.min(0).values, rows.max(0).values
    width = (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    bins = ((rows - low) / width * _BINS).long().clamp(max=_BINS - 1)
    d = rows.shape[1]
    cells = bins + torch.arange(d) * _BINS
    for factor in factors.cpu().T:
        values, labels = factor.unique(return_inverse=True)
        counts = torch.bincount(
            (cells * len(values) + labels[:, None]).flatten(), minlength=d * _BINS * len(values)
        )
        yield counts.view(d, _BINS, len(values)).double().numpy()


def _gap(scores: PerFactor) -> Float[np.ndarray, " factors"]:
    if len(scores) < 2:
        return scores[0]
    best = np.sort(scores, axis=0)
    return best[-1] - best[-2]


def _focus(weights: np.ndarray) -> np.ndarray:
    """One minus the normalised entropy of each row; 0 for a row of zeros."""
    if weights.shape[1] < 2:
        return np.ones(len(weights))
    total = weights.sum(1, keepdims=True)
    share = np.divide(
        weights, total, out=np.full_like(weights, 1 / weights.shape[1]), where=total > 0
    )
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
    return 1 - entropy / np.log(weights.shape[1])


def _check_factors(z: Codes, factors: Factors) -> None:
    check_codes(z)
    if factors.ndim != 2 or len(factors) != z.shape[0]:
        raise ValueError(
            f"factors must have one row per item, ({z.shape[0]}, factors); got "
            f"{tuple(factors.shape)}"
        )
