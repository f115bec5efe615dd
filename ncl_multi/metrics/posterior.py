"""Does a loss find the classes behind the data? A world with known classes.

Items are drawn from overlapping classes; two items of one class are a pair. The best non-negative
features are then P(class | x) / sqrt(P(class)), in any order (NCL, theorem 5), while signed ones
are as good after any rotation.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from tqdm.auto import trange

from ncl_multi.losses import spectral


@dataclass(frozen=True)
class World:
    """A joint distribution of items and classes."""

    joint: Float[np.ndarray, "items classes"]
    """P(x, class)."""

    @classmethod
    def draw(cls, items: int = 200, classes: int = 8, overlap: float = 0.1, seed: int = 0):
        """Classes of unequal size; a share `overlap` of each one's draws are others' items."""
        rng = np.random.default_rng(seed)
        p_class = rng.dirichlet(np.full(classes, 20.0))
        inside = rng.dirichlet(np.full(items, 5.0), classes).T
        inside *= (np.arange(items) % classes)[:, None] == np.arange(classes)
        outside = rng.dirichlet(np.full(items, 0.3), classes).T
        shares = (1 - overlap) * inside / inside.sum(axis=0) + overlap * outside
        return cls(shares / shares.sum(axis=0) * p_class)

    @property
    def features(self) -> Float[np.ndarray, "items classes"]:
        """P(class | x) / sqrt(P(class)), what NCL should find."""
        by_item = self.joint / self.joint.sum(axis=1, keepdims=True)
        return by_item / np.sqrt(self.joint.sum(axis=0))

    @property
    def cooccurrence(self) -> Float[np.ndarray, "items items"]:
        """P(x, x+) / sqrt(P(x) P(x+)), exactly."""
        p_class, p_item = self.joint.sum(axis=0), self.joint.sum(axis=1)
        pairs = (self.joint / p_class) @ self.joint.T
        return pairs / np.sqrt(np.outer(p_item, p_item))


def learn_features(
    world: World, *, signed: bool, steps: int = 1500, batch_size: int = 2048, seed: int = 0
) -> Float[np.ndarray, "items classes"]:
    """A free vector per item after training on drawn pairs with the spectral loss."""
    joint = torch.from_numpy(world.joint)
    items, classes = joint.shape
    p_class, given_class = joint.sum(dim=0), (joint / joint.sum(dim=0)).T
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        z = torch.rand(items, classes, requires_grad=True)
        optimizer = torch.optim.Adam([z])
        for step in trange(steps, desc="signed" if signed else "non-negative", disable=None):
            optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
            drawn = torch.multinomial(p_class, batch_size, replacement=True)
            counts = torch.bincount(drawn, minlength=classes).tolist()
            pairs = torch.cat(
                [
                    torch.multinomial(shares, 2 * count, replacement=True).view(count, 2)
                    for shares, count in zip(given_class, counts, strict=True)
                    if count
                ]
            )
            loss = spectral(z[pairs[:, 0]], z[pairs[:, 1]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not signed:
                # Each entry is a free parameter: where ReLU is zero it would have no gradient.
                # Clamping is the same constraint without dead entries.
                z.data.clamp_(min=0)
    return z.detach().numpy()


def match_columns(
    learnt: Float[np.ndarray, "items d"], truth: Float[np.ndarray, "items d"]
) -> tuple[Float[np.ndarray, "items d"], float]:
    """Columns in the order and with the signs that fit best, and their mean correlation.

    Example:
        >>> truth = np.eye(3)
        >>> columns, correlation = match_columns(-truth[:, [2, 0, 1]], truth)
        >>> bool((columns == truth).all()), round(correlation, 3)
        (True, 1.0)
    """
    from scipy.optimize import linear_sum_assignment

    with np.errstate(invalid="ignore"):
        between = np.corrcoef(learnt.T, truth.T)[: learnt.shape[1], learnt.shape[1] :]
    between = np.nan_to_num(between)
    rows, columns = linear_sum_assignment(-np.abs(between))
    order = rows[np.argsort(columns)]
    signs = np.where(between[order, np.arange(len(order))] < 0, -1, 1)
    return learnt[:, order] * signs, float(np.abs(between[rows, columns]).mean())
