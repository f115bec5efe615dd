"""How well do features predict classes? Nearest neighbours and a linear probe."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.metrics.codes import check_codes, dense, unit_rows

TrainCodes: TypeAlias = Float[Tensor, "train d"] | csr_array
TestCodes: TypeAlias = Float[Tensor, "test d"] | csr_array
TrainLabels = Int[Tensor, " train"]
TestLabels = Int[Tensor, " test"]

_VOTE_TEMPERATURE = 0.07
_PENALTIES = tuple(10.0**power for power in (-1, -2, -3, -4, -5, -6))
_SCORES_AT_ONCE = 2**24


def knn_accuracy(
    train_z: TrainCodes, train_y: TrainLabels, test_z: TestCodes, test_y: TestLabels, k: int = 20
) -> float:
    """Accuracy of a vote of the k rows most similar by cosine, each weighted by exp(cosine / 0.07).

    Rows tied at the k-th place share the places that are left, and classes tied in the vote share
    the hit: the figure does not depend on the order of rows, and a row of zeros scores chance.

    Example:
        >>> z, y = torch.eye(3), torch.arange(3)
        >>> knn_accuracy(z, y, z, y, k=1)
        1.0
    """
    _check(train_z, train_y, test_z, test_y)
    train, test = (dense(unit_rows(z)).float() for z in (train_z, test_z))
    both = torch.cat([train_y.to(train.device), test_y.to(train.device)])
    classes, labels = both.unique(return_inverse=True)
    one_hot = F.one_hot(labels[: len(train)], len(classes)).to(train)
    truth = labels[len(train) :]
    k = min(k, len(train))
    hits = 0.0
    for rows in torch.arange(len(test)).split(max(1, _SCORES_AT_ONCE // len(train))):
        scores = test[rows] @ train.T
        last = scores.topk(k, dim=1).values[:, -1:]
        above, tied = scores > last, scores == last
        places = (k - above.sum(1, keepdim=True)) / tied.sum(1, keepdim=True)
        weights = ((scores - 1) / _VOTE_TEMPERATURE).exp() * (above + tied * places)
        votes = weights @ one_hot
        # Equal votes that were summed in another order differ in the last bits.
        best = votes >= votes.max(1, keepdim=True).values * (1 - 1e-5)
        right = best.gather(1, truth[rows, None])[:, 0].double()
        hits += float((right / best.sum(1)).sum())
    return hits / len(test)


def linear_probe(
    train_z: TrainCodes, train_y: TrainLabels, test_z: TestCodes, test_y: TestLabels
) -> float:
    """Test accuracy of logistic regression whose penalty was chosen on a fifth of the train rows.

    Example:
        >>> z = torch.eye(4).repeat(10, 1)
        >>> y = torch.arange(4).repeat(10)
        >>> linear_probe(z, y, z, y)
        1.0
    """
    _check(train_z, train_y, test_z, test_y)
    return LinearProbe.fit(train_z, train_y).accuracy(test_z, test_y)


@dataclass(frozen=True)
class LinearProbe:
    """A fitted multinomial logistic regression on unit rows.

    `penalty` is the weight decay that was chosen, `validation` its accuracy on the rows held out
    for the choice. The probe itself was then fitted to all rows.
    """

    weight: Float[Tensor, "classes d"]
    bias: Float[Tensor, " classes"]
    classes: Int[Tensor, " classes"]
    scale: float
    penalty: float
    validation: float

    @classmethod
    def fit(cls, z: TrainCodes, y: TrainLabels, seed: int = 0) -> "LinearProbe":
        """Choose the penalty on a fifth of the rows, then fit to all of them."""
        check_codes(z)
        rows = dense(unit_rows(z)).float()
        classes, labels = y.to(rows.device).unique(return_inverse=True)
        # One factor for all entries: their size then does not depend on the width.
        scale = 1 / max(float(rows.std()), 1e-6) if rows.numel() > 1 else 1.0
        rows = rows * scale
        held_out = _fifth_of_each_class(labels, len(classes), seed)
        state = _start(rows, len(classes))
        best, accuracy = _PENALTIES[0], -1.0
        for penalty in _PENALTIES:
            state = _descend(rows[~held_out], labels[~held_out], state, penalty)
            guess = (rows[held_out] @ state[0].T + state[1]).argmax(1)
            got = float((guess == labels[held_out]).float().mean()) if len(guess) else 0.0
            if got > accuracy:
                best, accuracy, best_state = penalty, got, state
        weight, bias = _descend(rows, labels, best_state, best)
        return cls(weight, bias, classes, scale, best, accuracy)

    def predict(self, z: TestCodes) -> Int[Tensor, " test"]:
        """The likeliest class of each row."""
        rows = dense(unit_rows(z)).float() * self.scale
        return self.classes[(rows @ self.weight.T + self.bias).argmax(1)]

    def accuracy(self, z: TestCodes, y: TestLabels) -> float:
        """Share of rows whose likeliest class is their own."""
        return float((self.predict(z) == y.to(self.classes.device)).double().mean())


def _start(rows: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    return rows.new_zeros(classes, rows.shape[1]), rows.new_zeros(classes)


def _descend(
    rows: Tensor, labels: Tensor, state: tuple[Tensor, Tensor], penalty: float
) -> tuple[Tensor, Tensor]:
    """Full-batch LBFGS, started from the solution of the last, stronger penalty."""
    weight, bias = (tensor.clone().requires_grad_() for tensor in state)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=60, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = F.cross_entropy(F.linear(rows, weight, bias), labels)
            value = value + penalty * weight.square().sum()
            value.backward()
        return value

    optimizer.step(loss)
    return weight.detach(), bias.detach()


def _fifth_of_each_class(labels: Tensor, classes: int, seed: int) -> Tensor:
    """A mask of held-out rows; every class keeps at least one row to learn from."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator).to(labels.device)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    size = torch.bincount(labels, minlength=classes)
    first = size.cumsum(0) - size
    place = torch.arange(len(labels), device=labels.device) - first[labels[by_class]]
    mask = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    mask[by_class] = place < (size // 5)[labels[by_class]]
    return mask


def _check(train_z: TrainCodes, train_y: Tensor, test_z: TestCodes, test_y: Tensor) -> None:
    for z, y, name in ((train_z, train_y, "train"), (test_z, test_y, "test")):
        check_codes(z)
        if y.ndim != 1 or len(y) != z.shape[0]:
            raise ValueError(f"{name}: expected one label per row: {z.shape[0]} rows, got {len(y)}")
    if train_z.shape[1] != test_z.shape[1]:
        raise ValueError(
            f"train and test codes must be equally wide; got {train_z.shape[1]} and "
            f"{test_z.shape[1]}. Use two files of the same model"
        )
