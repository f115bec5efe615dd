"""Trained heads that come with this package: only the base encoder is fetched.

A head is much smaller than its encoder, so it can be part of the wheel. Its folder has
`config.json`, `head.safetensors` and a model card, `README.md`.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from ncl_multi.files import Expected, atomic_folder, read_json, read_safetensors
from ncl_multi.model import SparseModel, fingerprint, model_class
from ncl_multi.settings import nested_values

FORMAT = "ncl_multi.head/1"
SHIPPED = Path(__file__).with_name("pretrained")
"""The heads of the package, one folder each."""
MOST_BYTES = 4_000_000
"""Most bytes of the weights of a head in the package."""

_KEYS = ("format", "kind", "base", "base_weights", "options", "command", "trained_on", "figures")
_TENSORS = {"*": Expected(("F16", "F32", "I8", "I64"), (0, 1, 2))}
_SCALE = ".scale"
_WIDE = 4096


def pretrained(name: str) -> Any:
    """A trained model of this package: `ncl.pretrained("minilm-384")`.

    The encoder is fetched if it is not in the cache. The card, with its figures and the command
    that trained it, is `ncl_multi/pretrained/<name>/README.md`.
    """
    names = pretrained_names()
    if name not in names:
        raise ValueError(
            f"pretrained must be one of {', '.join(names) or '(none in this version)'}; got "
            f"{name!r}. Load your own model with ncl.load(folder)"
        )
    return load_head(SHIPPED / name)


def pretrained_names() -> list[str]:
    """Names that `pretrained` takes."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


def export_head(
    model: SparseModel,
    folder: str | Path,
    *,
    base: str,
    command: str,
    figures: dict[str, Any] | None = None,
    precision: Literal["float16", "int8"] = "float16",
) -> Path:
    """Write the head of a model without its encoder, for `load_head`.

    Args:
        model: A trained `NonNegEncoder` or `NonNegClip` whose encoder was frozen.
        folder: Folder to write; its name is the model's name in the card.
        base: Name of the encoder: `minilm`, `wordllama` or a name on the hub for sentences, a
            name of towers for CLIP.
        command: The command that trained it, for the card.
        figures: Measurements for the card; None takes those of the model.
        precision: Precision of the weights. `int8` has one scale per dimension.
    """
    if not model.trained:
        raise ValueError("this head is untrained; train it before it is exported")
    state: dict[str, Tensor] = {}
    for name, tensor in model.head_part().state_dict().items():
        # Only matrices: a variance or a mean may be outside the range of float16.
        if tensor.ndim < 2:
            state[name] = tensor.cpu().contiguous()
        elif precision == "float16":
            state[name] = tensor.half().cpu().contiguous()
        else:
            scale = tensor.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
            state[name] = (tensor / scale).round().to(torch.int8).cpu().contiguous()
            state[name + _SCALE] = scale.float().cpu().contiguous()
    size = sum(tensor.nbytes for tensor in state.values())
    if size > MOST_BYTES:
        raise ValueError(
            f"the head takes {size:,} bytes in {precision}, at most {MOST_BYTES:,} are shipped: "
            f"use {'int8, or ' if precision == 'float16' else ''}fewer dimensions"
        )
    figures = model.figures if figures is None else figures
    config = {
        "format": FORMAT, "kind": model.kind, "base": base,
        "base_weights": fingerprint(model.base_part()), "options": model.options(),
        "command": command, "trained_on": model.trained_on,
        "figures": figures,
    }  # fmt: skip
    folder = Path(folder)
    with atomic_folder(folder) as unfinished:
        save_file(state, unfinished / "head.safetensors")
        (unfinished / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        card = model.card(f'ncl.pretrained("{folder.name}")', figures)
        made_by = (
            f"\n## Made by\n\n```bash\n{command}\n```\n\nThe encoder is `{base}`, unchanged.\n"
        )
        (unfinished / "README.md").write_text(card + made_by)
    load_head(folder)
    return folder


def load_head(folder: str | Path) -> Any:
    """The model of a folder that `export_head` wrote, on its base encoder."""
    folder = Path(folder)
    config = read_json(folder / "config.json", keys=_KEYS)
    if config["format"] != FORMAT:
        raise ValueError(f"{folder} has the format {config['format']!r:.80}, not {FORMAT!r}")
    stored, _ = read_safetensors(folder / "head.safetensors", _TENSORS, framework="pt")
    sizes = {size for tensor in stored.values() for size in tensor.shape}
    for number in nested_values(config["options"]):
        if isinstance(number, int) and number > _WIDE and number not in sizes:
            raise ValueError(f"{folder} is damaged: no weights have the width {number}")
    try:
        model = model_class(config["kind"]).on_base(config["base"], config["options"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is damaged: its config does not fit: {error!r:.200}") from error
    if fingerprint(model.base_part()) != config["base_weights"]:
        raise ValueError(
            f"the encoder {config['base']!r} has other weights than the one that this head was "
            f"trained on; remove it from the cache and fetch it again"
        )
    head = model.head_part()
    state = {}
    for name, tensor in stored.items():
        if name + _SCALE in stored:
            state[name] = tensor.float() * stored[name + _SCALE]
        elif not name.endswith(_SCALE):
            state[name] = tensor.float() if tensor.dtype == torch.float16 else tensor
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{folder} is damaged: {error}") from error
    model.trained_on, model.figures = config["trained_on"], config["figures"]
    return model.eval()
