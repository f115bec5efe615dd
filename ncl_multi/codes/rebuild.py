"""From codes back to embeddings: a linear decoder, fitted once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

_RIDGE = 0.1
_DIRECT = 4096
"""Up to this many dimensions the normal equations are solved directly, which is faster."""
_STEPS = 50
_HELD_OUT = 20
"""With at least this many rows, a tenth is held out to measure the error."""


@dataclass(frozen=True)
class LinearDecoder:
    """`mean + codes @ atoms`: each dimension adds its atom to an embedding."""

    mean: np.ndarray
    atoms: np.ndarray

    def __call__(self, codes: csr_array) -> np.ndarray:
        return self.mean + codes.astype(np.float32) @ self.atoms

    @classmethod
    def fit(cls, codes: csr_array, x: np.ndarray) -> tuple["LinearDecoder", float]:
        """Ridge regression, and its squared error as a share of the variance of held-out rows.

        The last tenth is held out; with fewer than 20 rows the error is that of the fitted ones.
        """
        first = len(x) - len(x) // 10 if len(x) >= _HELD_OUT else len(x)
        mean = x[:first].mean(axis=0, dtype=np.float64)
        atoms = ridge(codes[:first], x[:first] - mean)
        decoder = cls(mean.astype(np.float32), atoms.astype(np.float32))
        test = slice(first if first < len(x) else 0, None)
        # Squares of large numbers do not fit in 32 bits.
        off = np.square(x[test].astype(np.float64) - decoder(codes[test])).sum()
        spread = np.square(x[test] - mean).sum()
        return decoder, float(off / spread) if spread > 0 else 0.0

    def state(self) -> dict[str, Tensor]:
        """The arrays to save."""
        return {"mean": torch.from_numpy(self.mean), "atoms": torch.from_numpy(self.atoms)}

    @classmethod
    def of_state(cls, state: dict[str, Tensor], dims: int, width: int) -> "LinearDecoder":
        """A decoder of codes of `dims` dimensions, as `state` described it."""
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != {"mean": (width,), "atoms": (dims, width)}:
            raise ValueError(f"the decoder must turn {dims} dimensions into {width}; got {shapes}")
        return cls(state["mean"].numpy(), state["atoms"].numpy())


def ridge(z: csr_array, target: np.ndarray) -> np.ndarray:
    """Solve `(z.T z + ridge) atoms = z.T target` in double precision.

    Wide codes by conjugate gradients, all columns at once: a dims x dims matrix would be larger
    than the data.

    Example:
        >>> ridge(csr_array(np.eye(2)), np.array([[1.1], [2.2]])).round(6)
        array([[1.],
               [2.]])
    """
    z, target = z.astype(np.float64), target.astype(np.float64)
    right = z.T @ target
    if z.shape[1] > _DIRECT:
        return _conjugate_gradients(lambda a: z.T @ (z @ a) + _RIDGE * a, right)
    gram = torch.from_numpy((z.T @ z).toarray())
    gram.diagonal().add_(_RIDGE)
    return torch.cholesky_solve(torch.from_numpy(right), torch.linalg.cholesky(gram)).numpy()


def _conjugate_gradients(
    product: Callable[[np.ndarray], np.ndarray], right: np.ndarray
) -> np.ndarray:
    atoms = np.zeros_like(right)
    residual = right
    direction, size = residual.copy(), np.square(residual).sum(axis=0)
    enough = 1e-8 * size.max(initial=0.0)
    for _ in range(_STEPS):
        if size.max(initial=0.0) <= enough:
            break
        image = product(direction)
        curve = (direction * image).sum(axis=0)
        step = np.divide(size, curve, out=np.zeros_like(size), where=curve > 0)
        atoms += step * direction
        residual = residual - step * image
        previous, size = size, np.square(residual).sum(axis=0)
        turn = np.divide(size, previous, out=np.zeros_like(size), where=previous > 0)
        direction = residual + turn * direction
    return atoms
