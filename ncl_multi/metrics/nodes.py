"""Quality of node codes: a classifier on few labels, clusters from the codes, links."""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from scipy.sparse import csr_array, issparse
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.codes.features import to_csr
from ncl_multi.metrics.codes import Codes, gram, unit_rows
from ncl_multi.optional import needs

with needs("ncl-multi[graph]"):
    from sklearn.cluster import AgglomerativeClustering, KMeans
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import (
        adjusted_rand_score,
        average_precision_score,
        normalized_mutual_info_score,
        roc_auc_score,
    )
    from sklearn.multiclass import OneVsRestClassifier

_PENALTIES = 2.0 ** np.arange(-10, 11, 2)
Pairs = Int[Tensor, "2 pairs"]


class Split(NamedTuple):
    """Nodes to learn from, to choose settings on, and to report."""

    train: Tensor
    validation: Tensor
    test: Tensor


def random_split(y: Tensor, seed: int, share: float = 0.1) -> Split:
    """A tenth of the labelled nodes to learn from, a tenth to choose on, the rest to report."""
    labelled = (y >= 0).nonzero()[:, 0].cpu()
    if len(labelled) < 3:
        raise ValueError(f"a split needs at least three labelled nodes; got {len(labelled)}")
    order = labelled[torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed))]
    count = max(1, round(share * len(order)))
    return Split(order[:count], order[count : 2 * count], order[2 * count :])


def node_accuracy(z: Codes, y: Tensor, split: Split) -> dict[str, float]:
    """Accuracy on `validation` and `test` nodes of logistic regression on the `train` nodes.

    The classifier of GRACE and BGRL: rows of unit length, one class against the rest, liblinear
    with all its defaults. C, from 2^-10 to 2^10, is the best on the validation nodes.

    Example:
        >>> y = torch.arange(2).repeat(30)
        >>> node_accuracy(torch.eye(2)[y], y, random_split(y, seed=0))
        {'validation': 1.0, 'test': 1.0}
    """
    # liblinear is several times faster on sparse rows.
    rows: Any = csr_array(unit_rows(z)) if issparse(z) else to_csr(_fewer_columns(z))
    labels = y.cpu().numpy()
    train, validation, test = (numbers.cpu().numpy() for numbers in split)
    if len(np.unique(labels[train])) < 2:
        raise ValueError("the nodes to learn from all have one label; draw another split")
    best = {"validation": -1.0}
    for penalty in _PENALTIES:
        model = OneVsRestClassifier(LogisticRegression(solver="liblinear", C=penalty))
        model.fit(rows[train], labels[train])
        right = float(model.score(rows[validation], labels[validation]))
        if right > best["validation"]:
            best = {"validation": right, "test": float(model.score(rows[test], labels[test]))}
    return best


def strongest_dimension(z: Codes) -> Int[Tensor, " n"]:
    """The cluster of a node by its code: the dimension with the largest entry."""
    if isinstance(z, Tensor):
        return z.argmax(dim=1)
    return torch.from_numpy(np.asarray(z.argmax(axis=1)).ravel().astype(np.int64))


def strongest_group(z: Codes, groups: int | None = None) -> Int[Tensor, " n"]:
    """The cluster of a node by groups of dimensions: the group with the largest sum of entries.

    Dimensions that fire for the same nodes are joined, nearest first (average linkage on their
    cosines), until `groups` groups are left. Silent dimensions are in no group. None takes the
    groups of `communities`, which do not have to be told how many there are.

    Example:
        >>> z = torch.tensor([[1.0, 1, 0], [1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]])
        >>> strongest_group(z, 2).unique(return_counts=True)[1]
        tensor([3, 1])
    """
    group = communities(z) if groups is None else _nearest_joined(z, groups)
    belongs = (group[:, None] == np.arange(group.max() + 1)).astype(np.float32)
    if belongs.shape[1] < 2:
        return torch.zeros(z.shape[0], dtype=torch.int64)
    unit = unit_rows(z)
    unit = unit.cpu().numpy() if isinstance(unit, Tensor) else unit
    return torch.from_numpy(np.asarray(unit @ belongs).argmax(axis=1))


def communities(z: Codes) -> Int[np.ndarray, " d"]:
    """The group of each dimension: dimensions of a group fire for the same nodes.

    Greedy modularity (Clauset, Newman and Moore, arXiv cond-mat/0408187) of the dimensions'
    products: the two groups with the largest gain are joined until no pair has a gain, so their
    number follows from the codes. A silent dimension is a separate group.

    Example:
        >>> z = torch.tensor([[1.0, 1, 0, 0], [1, 0.9, 0, 0], [0, 0, 1, 0.5], [0, 0, 0.5, 1]])
        >>> communities(z).tolist()
        [0, 0, 1, 1]
    """
    weight = gram(z).double().clamp(min=0).cpu().numpy().copy()
    np.fill_diagonal(weight, 0)
    weight /= max(weight.sum(), 1e-12)
    group = np.arange(len(weight))
    while len(weight) > 1:
        share = weight.sum(axis=0)
        gain = weight - np.outer(share, share)
        np.fill_diagonal(gain, -np.inf)
        target, joined = sorted(divmod(int(gain.argmax()), len(weight)))
        # Rounding errors must not join groups.
        if gain[target, joined] <= 1e-12:
            break
        weight[target] += weight[joined]
        weight[:, target] += weight[:, joined]
        weight = np.delete(np.delete(weight, joined, axis=0), joined, axis=1)
        group[group == joined] = target
        group[group > joined] -= 1
    return group


def _nearest_joined(z: Codes, groups: int) -> Int[np.ndarray, " d"]:
    products = gram(z).double()
    length = products.diagonal().sqrt()
    fires = (length > 0).nonzero()[:, 0]
    group, count = np.full(z.shape[1], -1), min(groups, len(fires))
    if count < 2:
        return group
    apart = 1 - products[fires][:, fires] / torch.outer(length[fires], length[fires])
    joined = AgglomerativeClustering(count, metric="precomputed", linkage="average")
    group[fires.numpy()] = joined.fit_predict(apart.clamp(min=0).numpy())
    return group


def k_means(z: Codes, clusters: int, seed: int) -> Int[Tensor, " n"]:
    """Clusters of nodes by k-means, as for codes that cannot be read."""
    unit = unit_rows(z)
    rows = F.normalize(unit.float(), dim=1).cpu().numpy() if isinstance(unit, Tensor) else unit
    assignment = KMeans(clusters, n_init=10, random_state=seed).fit_predict(rows)
    return torch.from_numpy(assignment.astype(np.int64))


def link_prediction(z: Codes, linked: Pairs, others: Pairs) -> dict[str, float]:
    """How well the cosine of two nodes' codes separates linked pairs from others.

    The area under the ROC curve, and average precision. The model must not have seen these links.

    Example:
        >>> linked, others = torch.tensor([[0], [1]]), torch.tensor([[0], [2]])
        >>> link_prediction(torch.tensor([[1.0, 0], [1, 0], [0, 1]]), linked, others)
        {'link_auc': 1.0, 'link_ap': 1.0}
    """
    unit = unit_rows(z)
    scores = []
    for pairs in (linked, others):
        a, b = (unit[ends if isinstance(unit, Tensor) else ends.numpy()] for ends in pairs)
        product = a * b if isinstance(unit, Tensor) else a.multiply(b)
        scores.append(np.asarray(product.sum(1), dtype=np.float64).ravel())
    truth = np.repeat([1, 0], [len(of_pairs) for of_pairs in scores])
    predicted = np.concatenate(scores)
    return {
        "link_auc": float(roc_auc_score(truth, predicted)),
        "link_ap": float(average_precision_score(truth, predicted)),
    }


def agreement(clusters: Tensor, y: Tensor) -> dict[str, float | int]:
    """NMI and ARI of a clustering with the labels, on labelled nodes.

    Example:
        >>> agreement(torch.tensor([5, 5, 7]), torch.tensor([0, 0, 1]))
        {'clusters': 2, 'nmi': 1.0, 'ari': 1.0}
    """
    labelled = y >= 0
    got, truth = clusters[labelled].cpu().numpy(), y[labelled].cpu().numpy()
    return {
        "clusters": len(np.unique(got)),
        "nmi": float(normalized_mutual_info_score(truth, got)),
        "ari": float(adjusted_rand_score(truth, got)),
    }


def _fewer_columns(z: Tensor, most: int = 512) -> Tensor:
    """Dense rows of low rank as coordinates in their subspace; others unchanged.

    The codes of a linear head have at most the rank of its inputs. A penalised classifier does not
    depend on this rotation, and takes a fraction of the time.
    """
    if z.shape[1] <= 2 * most or (z == 0).float().mean() > 0.5:
        return z
    draw = torch.Generator().manual_seed(0)
    probe = torch.randn(len(z), most, generator=draw, dtype=torch.float64).to(z.device)
    axes = torch.linalg.qr(z.double().T @ probe).Q
    coordinates = z.double() @ axes
    whole = torch.allclose(coordinates.square().sum(1), z.double().square().sum(1), rtol=1e-6)
    return coordinates.to(z.dtype) if whole else z
