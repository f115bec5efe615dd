"""Fewer dimensions without training again: keep those of highest expected activation.

In a contrastive model every dimension matters as much as any other; in a non-negative one most of
what is known sits in a few, so a quarter of them often does as well as all.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ncl_multi.explain import unit_rows
from ncl_multi.features import Features
from ncl_multi.head import NonNegHead

Model = TypeVar("Model", bound=nn.Module)


def shorten(model: Model, dims: int, features: Any) -> Model:
    """A copy of a model, with the `dims` dimensions of its codes that are the most active.

    Every `NonNegHead` in the model is cut to the same dimensions, in their old order, so that the
    two sides of CLIP still fit. The copy saves, loads and exports like the model. A classifier
    behind the head, if there is one, stays as it was.

    Args:
        model: A `NonNegHead`, or any model that holds some.
        dims: Number of dimensions to keep.
        features: Codes of this model on data like the data to come: `Features`, a tensor or a
            `csr_array`; or a list of them, which count alike, as CLIP's images and texts.

    Example:
        >>> head = NonNegHead(8, 64).eval()
        >>> x = torch.randn(100, 8)
        >>> shorten(head, 16, head(x))(x).shape
        torch.Size([100, 16])
    """
    heads = [module for module in model.modules() if isinstance(module, NonNegHead)]
    if not heads:
        raise ValueError(
            f"shorten needs a model with a NonNegHead; {type(model).__name__} has none"
        )
    widths = {head.out_dim for head in heads}
    if len(widths) > 1:
        raise ValueError(f"heads to shorten together must be equally wide; got {sorted(widths)}")
    (width,) = widths
    kept = most_active(features, dims)
    got = {part.shape[1] for part in _parts(features)}
    if got != {width}:
        raise ValueError(
            f"features must be codes of this model, {width} wide; got {', '.join(map(str, got))}"
        )
    if isinstance(model, NonNegHead):
        return _cut(model, kept)  # type: ignore[return-value]
    shorter = deepcopy(model)
    for module in list(shorter.modules()):
        for name, child in module.named_children():
            if isinstance(child, NonNegHead):
                setattr(module, name, _cut(child, kept))
        _tell(module, width, dims)
    return shorter


def most_active(features: Any, dims: int) -> Tensor:
    """The numbers of the `dims` dimensions of highest expected activation, in ascending order.

    Use it to cut stored codes, or names, like `shorten` cuts the model.

    Example:
        >>> most_active(torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0]]), 2)
        tensor([1, 2])
    """
    parts = _parts(features)
    width = parts[0].shape[1]
    if any(part.shape[1] != width for part in parts):
        raise ValueError(
            f"features must be equally wide; got {', '.join(str(p.shape[1]) for p in parts)}"
        )
    if not 1 <= dims <= width:
        raise ValueError(f"dims must lie in 1..{width}, the width of the codes; got {dims}")
    expected = np.mean([part.mean(axis=0) for part in parts], axis=0)
    order = np.argsort(-expected, kind="stable")
    return torch.from_numpy(np.sort(order[:dims]))


def _parts(features: Any) -> list[Any]:
    several = isinstance(features, Sequence)
    parts = (
        [part.z if isinstance(part, Features) else part for part in features]
        if several
        else [features.z if isinstance(features, Features) else features]
    )
    rows = [unit_rows(part, signed=True) for part in parts]
    if not rows or any(part.shape[0] == 0 for part in rows):
        raise ValueError("features hold no codes to tell which dimensions are active")
    return rows


@torch.no_grad()
def _cut(head: NonNegHead, kept: Tensor) -> NonNegHead:
    shorter = NonNegHead(
        head.in_dim,
        len(kept),
        hidden_dim=head.hidden_dim,
        activation=head.activation,
        batch_norm=head.norm is not None,
        density=head.density,
        k=None if head.k is None else min(head.k, len(kept)),
    )
    shorter.to(head.out.weight).train(head.training)
    shapes = {name: part.shape for name, part in shorter.state_dict().items()}
    shorter.load_state_dict(
        {
            name: part if part.shape == shapes[name] else part[kept.to(part.device)]
            for name, part in head.state_dict().items()
        }
    )
    for old, new in zip(head.parameters(), shorter.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    return shorter


def _tell(module: nn.Module, width: int, dims: int) -> None:
    """Change what a module remembers of its width, which it writes down when it is saved."""
    if getattr(module, "dims", None) == width:
        module.dims = dims  # type: ignore[assignment]
    for name in ("options", "_hub_mixin_config"):
        kept = getattr(module, name, None)
        if isinstance(kept, dict):
            changed = {"dims": dims} if kept.get("dims") == width else {}
            if kept.get("k"):
                changed["k"] = min(kept["k"], dims)
            setattr(module, name, kept | changed)
