"""How good are node codes? A classifier on few labels, and clusters read off the codes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.codes.features import to_csr

try:
    from sklearn.cluster import KMeans
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.model_selection import GridSearchCV
    from sklearn.multiclass import OneVsRestClassifier
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("needs scikit-learn: pip install 'ncl-multi[graph]'") from error

_PENALTIES = 2.0 ** np.arange(-10, 11, 2)
_FOLDS = 5


def random_split(y: Tensor, seed: int, share: float = 0.1) -> tuple[Tensor, Tensor]:
    """GRACE's protocol: a random tenth of the labelled nodes to learn from, the rest to test on."""
    labelled = (y >= 0).nonzero()[:, 0].cpu()
    if len(labelled) < 2:
        raise ValueError(f"a split needs at least two labelled nodes; got {len(labelled)}")
    order = labelled[torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed))]
    count = max(1, round(share * len(order)))
    return order[:count], order[count:]


def node_accuracy(z: Tensor, y: Tensor, train: Tensor, test: Tensor) -> float:
    """Accuracy on `test` of logistic regression whose C was chosen by 5-fold cross-validation.

    GRACE's classifier: rows of unit length, one class against the rest, liblinear with all its
    defaults, C from 2^-10 to 2^10. With a class too small for five folds, C is 1.
    """
    # liblinear is several times faster on sparse rows, and takes them as they are.
    rows, labels = to_csr(_fewer_columns(z)), y.cpu().numpy()
    learn, ask = train.cpu().numpy(), test.cpu().numpy()
    _, sizes = np.unique(labels[learn], return_counts=True)
    if len(sizes) < 2:
        raise ValueError("the nodes to learn from all have one label; draw another split")
    model: Any = OneVsRestClassifier(LogisticRegression(solver="liblinear"))
    if sizes.min() >= _FOLDS:
        model = GridSearchCV(model, {"estimator__C": _PENALTIES}, cv=_FOLDS)
    return float(model.fit(rows[learn], labels[learn]).score(rows[ask], labels[ask]))


def strongest_dimension(z: Tensor) -> Tensor:
    """The cluster of a node read off its code: the dimension with the largest entry."""
    return z.argmax(dim=1)


def k_means(z: Tensor, clusters: int, seed: int) -> Tensor:
    """The usual way to cluster a code that cannot be read."""
    rows = F.normalize(z.float(), dim=1).cpu().numpy()
    found = KMeans(clusters, n_init=10, random_state=seed).fit_predict(rows)
    return torch.from_numpy(found)


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
    """Dense rows that lie in a space of few dimensions, as coordinates in it; others as they are.

    The codes of a linear head are no richer than what it was given. A penalised classifier does not
    see such a rotation, and takes a fraction of the time.
    """
    if z.shape[1] <= 2 * most or (z == 0).float().mean() > 0.5:
        return z
    draw = torch.Generator().manual_seed(0)
    probe = torch.randn(len(z), most, generator=draw, dtype=torch.float64).to(z.device)
    axes = torch.linalg.qr(z.double().T @ probe).Q
    found = z.double() @ axes
    whole = torch.allclose(found.square().sum(1), z.double().square().sum(1), rtol=1e-6)
    return found.to(z.dtype) if whole else z
