"""Fewer dimensions without training again.

The paper keeps the dimensions of highest expected activation. If the head standardises its
output, all dimensions are about as active, and the most active tend to be alike; so the default
also considers what the kept ones already cover.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ncl_multi.codes.explain import unit_csr
from ncl_multi.codes.features import Features, spread
from ncl_multi.head import NonNegHead

Model = TypeVar("Model", bound=nn.Module)
Rule = Literal["coverage", "activation"]

_ROWS = 10_000
"""Most codes of each side used to compute products of dimensions."""


def shorten(model: Model, dims: int, features: Any, *, by: Rule = "coverage") -> Model:
    """A copy of a model whose codes have only the `dims` most important dimensions.

    Every `NonNegHead` in the model is cut to the same dimensions, in their old order, so that the
    two sides of CLIP still fit. The copy saves, loads and exports like the model. A classifier
    behind the head, if there is one, stays as it was.

    Args:
        model: A `NonNegHead`, or any model that contains one.
        dims: Number of dimensions to keep.
        features: Codes of this model on representative data: `Features`, a tensor or a
            `csr_array`; or a list of them with equal weight, as CLIP's images and texts.
        by: Rule of importance, see `worth_keeping`.

    Example:
        >>> head = NonNegHead(8, 64).eval()
        >>> x = torch.randn(100, 8)
        >>> shorten(head, 16, head(x))(x).shape
        torch.Size([100, 16])
    """
    widths = {module.out_dim for module in model.modules() if isinstance(module, NonNegHead)}
    if not widths:
        raise ValueError(
            f"shorten needs a model with a NonNegHead; {type(model).__name__} has none"
        )
    if len(widths) > 1:
        raise ValueError(f"heads to shorten together must be equally wide; got {sorted(widths)}")
    (width,) = widths
    indices = worth_keeping(features, dims, by=by)
    got = {codes.shape[1] for codes in _parts(features)}
    if got != {width}:
        raise ValueError(
            f"features must be codes of this model, {width} wide; got {', '.join(map(str, got))}"
        )
    if isinstance(model, NonNegHead):
        return _cut(model, indices)  # type: ignore[return-value]
    shorter = deepcopy(model)
    holders: list[Any] = [
        module
        for module in shorter.modules()
        if any(isinstance(submodule, NonNegHead) for submodule in module.modules())
        and not isinstance(module, NonNegHead)
    ]
    for module in holders:
        for name, child in module.named_children():
            if isinstance(child, NonNegHead):
                setattr(module, name, _cut(child, indices))
        if isinstance(getattr(module, "k", None), int):
            module.k = min(module.k, dims)
    return shorter


def worth_keeping(features: Any, dims: int, *, by: Rule = "coverage") -> Tensor:
    """The numbers of the `dims` dimensions to keep, in ascending order.

    Use it to cut stored codes, or names, as `shorten` cuts the model. `activation` is the paper's
    rule, the highest expected activation. `coverage` takes one dimension after another, each time
    the one with most activity that a linear combination of those taken does not explain (pivoted
    Cholesky); dimensions that say the same are taken once.

    Example:
        >>> z = torch.tensor([[3.0, 3.0, 0.0], [3.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
        >>> worth_keeping(z, 2, by="activation"), worth_keeping(z, 2)
        (tensor([0, 1]), tensor([0, 2]))
    """
    parts = _parts(features)
    width = parts[0].shape[1]
    if any(codes.shape[1] != width for codes in parts):
        raise ValueError(
            f"features must be equally wide; got {', '.join(str(p.shape[1]) for p in parts)}"
        )
    if not 1 <= dims <= width:
        raise ValueError(f"dims must lie in 1..{width}, the width of the codes; got {dims}")
    if by == "coverage":
        indices = _covering(sum(_products(codes) for codes in parts), dims)
    elif by == "activation":
        expected = np.mean([codes.mean(axis=0) for codes in parts], axis=0)
        indices = torch.from_numpy(np.argsort(-expected, kind="stable")[:dims].copy())
    else:
        raise ValueError(f"by must be coverage or activation; got {by!r}")
    return indices.sort().values


def _products(z: Any) -> Tensor:
    """Mean product of every two dimensions."""
    z = torch.from_numpy(z[spread(z.shape[0], _ROWS)].astype(np.float32).toarray())
    return (z.T @ z).double() / len(z)


def _covering(products: Any, dims: int) -> Tensor:
    factor = products.new_zeros(len(products), dims)
    unexplained = products.diagonal().clone()
    taken: list[int] = []
    for step in range(dims):
        pivot = int(unexplained.argmax())
        taken.append(pivot)
        explained = products[:, pivot] - factor[:, :step] @ factor[pivot, :step]
        # Rounding leaves a little of what is fully explained; do not divide by it.
        factor[:, step] = explained / unexplained[pivot].clamp(min=1e-12).sqrt()
        unexplained = (unexplained - factor[:, step].square()).clamp(min=0)
        unexplained[taken] = -1
    return torch.tensor(taken)


def _parts(features: Any) -> list[Any]:
    sides = features if isinstance(features, Sequence) else [features]
    rows = [unit_csr(side.z if isinstance(side, Features) else side, signed=True) for side in sides]
    if not rows or any(side.shape[0] == 0 for side in rows):
        raise ValueError("features must contain at least one code each")
    return rows


@torch.no_grad()
def _cut(head: NonNegHead, indices: Tensor) -> NonNegHead:
    shorter = NonNegHead(
        head.in_dim,
        len(indices),
        hidden_dim=head.hidden_dim,
        activation=head.activation,
        batch_norm=head.norm is not None,
        density=head.density,
        k=None if head.k is None else min(head.k, len(indices)),
    )
    shorter.to(head.out.weight).train(head.training)
    shapes = {name: tensor.shape for name, tensor in shorter.state_dict().items()}
    shorter.load_state_dict(
        {
            name: tensor if tensor.shape == shapes[name] else tensor[indices.to(tensor.device)]
            for name, tensor in head.state_dict().items()
        }
    )
    for old, new in zip(head.parameters(), shorter.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    return shorter
