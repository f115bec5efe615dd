"""A Hugging Face model as a plain encoder: one vector per item."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ncl_multi.files import most_memory, parse_json, read_json, read_picture
from ncl_multi.model import check_fits
from ncl_multi.optional import needs
from ncl_multi.settings import check_no_code

with needs("ncl-multi[sentence]"):
    import transformers

SUFFIXES = {
    ".codes", ".jinja", ".json", ".md", ".model", ".safetensors", ".spm", ".txt",
}  # fmt: skip
"""Endings of settings, vocabularies and weights: all that `Encoder.save` writes."""
MODULES = (
    "Transformer", "Pooling", "Normalize", "Dense", "Dropout", "LayerNorm", "StaticEmbedding",
    "Router",
)  # fmt: skip
"""Modules of sentence-transformers that a saved encoder may have."""
Pooling = Literal["mean", "cls", "last", "pooler", "own", "tokens"]
Tower = Literal["text", "image"]

# Their class token is normalised in the pooled output only.
_POOLER_MODELS = ("clip_vision_model", "siglip_vision_model")


class Encoder(nn.Module):
    """A Hugging Face model with its processor and a pooling: one vector per item."""

    def __init__(self, model: nn.Module, processor: Any, pooling: Pooling, tower: Tower):
        super().__init__()
        self.model, self.processor, self.pooling, self.tower = model, processor, pooling, tower
        self.stock = hasattr(model, "preprocess") and hasattr(model, "save_pretrained")
        self.width = self._width()

    @classmethod
    def load(
        cls,
        source: str | Path | nn.Module,
        pooling: Pooling | None = None,
        tower: Tower | None = None,
        processor: Any = None,
        trust_remote_code: bool = False,
    ) -> "Encoder":
        """Load an encoder from a name, a folder or a module."""
        if pooling is not None and pooling not in get_args(Pooling):
            raise ValueError(
                f"pooling must be one of {', '.join(get_args(Pooling))}; got {pooling!r}"
            )
        if isinstance(source, nn.Module):
            if hasattr(source, "preprocess"):
                if pooling == "tokens":
                    raise ValueError("pooling='tokens' takes the name or folder of an encoder")
                return cls(source, source, "own", "text")
            if not hasattr(source, "config"):
                raise ValueError(
                    f"a loaded encoder must come from transformers or sentence-transformers; "
                    f"got {type(source).__name__}"
                )
            config, model = source.config, source
            name = str(getattr(config, "_name_or_path", ""))
        else:
            name, model = str(source), None
            try:
                config = _config(name, trust_remote_code)
            except ValueError:
                # Static token vectors have no config of transformers.
                if tower == "image" or pooling not in (None, "own") or not _is_stock(name):
                    raise
                stock = _sentence_transformer(name, trust_remote_code)
                return cls(stock, stock, "own", "text")
        tower = _tower(config, tower, name)
        if pooling == "tokens" and tower != "text":
            raise ValueError(f"pooling='tokens' needs a text encoder; {name} reads images")
        if model is None and tower == "text" and pooling in (None, "own") and _is_stock(name):
            stock = _sentence_transformer(name, trust_remote_code)
            return cls(stock, stock, "own", "text")
        if model is None:
            model = _auto_model(config).from_pretrained(name, trust_remote_code=trust_remote_code)
        if processor is None:
            auto = (
                transformers.AutoTokenizer if tower == "text" else transformers.AutoImageProcessor
            )
            try:
                processor = auto.from_pretrained(name, trust_remote_code=trust_remote_code)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"no {auto.__name__[4:].lower()} found for {name or type(model).__name__}: "
                    f"give one as processor= ({error})"
                ) from error
        if pooling in (None, "own"):
            pooling = _default_pooling(config, tower)
        return cls(model, processor, pooling, tower)

    @classmethod
    def load_saved(
        cls, folder: Path, pooling: Pooling | None, tower: Tower | None, trust_remote_code: bool
    ) -> "Encoder":
        """What `save` wrote; a folder that could run code is refused unless it is trusted."""
        if not trust_remote_code:
            check_no_code(folder, SUFFIXES)
            _check_sizes(folder)
        return cls.load(folder, pooling, tower, trust_remote_code=trust_remote_code)

    def prepare(self, items: list[Any]) -> dict[str, Tensor]:
        """Inputs of one batch."""
        if self.stock:
            return {
                name: tensor
                for name, tensor in self.processor.preprocess(items).items()
                if isinstance(tensor, Tensor)
            }
        if self.tower == "image":
            return {"pixel_values": self.processor(images=items, return_tensors="pt").pixel_values}
        if self.processor.pad_token is None:
            self.processor.pad_token = self.processor.eos_token
        return dict(
            self.processor(
                items, padding=True, truncation=True, max_length=self.window, return_tensors="pt"
            )
        )

    @property
    def window(self) -> int | None:
        """Most tokens of a text that are read at once; None for no limit."""
        if self.tower != "text":
            return None
        if self.stock:
            most = getattr(self.model, "max_seq_length", None)
            return None if most is None or most == float("inf") else int(most)
        most = getattr(self.model.config, "max_position_embeddings", None)
        return min(self.processor.model_max_length, most or 8192)

    def passages(self, text: str) -> list[str]:
        """The text split into as few pieces of about equal length as fit the window."""
        # A token has at least one letter, so most texts need not be counted.
        if self.window is None or len(text) <= self.window:
            return [text]
        tokenizer: Any = self.model.tokenizer if self.stock else self.processor
        count = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
        if count <= self.window:
            return [text]
        # Words have different numbers of tokens: pieces of equal words need room to differ.
        words, pieces = text.split(), -(-count // int(0.9 * self.window))
        ends = [len(words) * piece // pieces for piece in range(pieces + 1)]
        passages = [" ".join(words[start:end]) for start, end in pairwise(ends)]
        return [passage for passage in passages if passage] or [text]

    def forward(self, inputs: dict[str, Tensor]) -> Float[Tensor, "n width"]:
        if self.stock:
            return self.model(dict(inputs))["sentence_embedding"]
        if hasattr(self.model, "get_image_features"):
            inputs_of_tower = (
                ("pixel_values",) if self.tower == "image" else ("input_ids", "attention_mask")
            )
            pick = getattr(self.model, f"get_{self.tower}_features")
            out = pick(**{name: inputs[name] for name in inputs_of_tower})
            return out if isinstance(out, Tensor) else out.pooler_output
        return pool(self.model(**inputs), inputs.get("attention_mask"), self.pooling)

    def tokens(self, inputs: dict[str, Tensor]) -> list[Float[Tensor, "tokens width"]]:
        """The tokens of each text of a batch, without padding."""
        h = self.model(**inputs).last_hidden_state
        return [rows[mask] for rows, mask in zip(h, inputs["attention_mask"].bool(), strict=True)]

    def save(self, folder: Path) -> None:
        """Write a folder that `load` reads."""
        self.model.save_pretrained(str(folder))  # type: ignore[operator]
        if not self.stock:
            self.processor.save_pretrained(str(folder))

    @torch.no_grad()
    def _width(self) -> int:
        blank: Any = "a" if self.tower == "text" else np.zeros((64, 64, 3), dtype=np.uint8)
        training = [module for module in self.modules() if module.training]
        inputs = {name: tensor.to(self.device) for name, tensor in self.prepare([blank]).items()}
        width = self.eval()(inputs).shape[1]
        for module in training:
            module.training = True
        return width

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def pool(
    out: Any, mask: Int[Tensor, "n tokens"] | None, pooling: Pooling
) -> Float[Tensor, "n width"]:
    """One vector per row from what a transformers model returns."""
    h = out.last_hidden_state
    if pooling == "pooler":
        return out.pooler_output.flatten(1)
    if h.ndim == 4:
        return h.mean(dim=(2, 3))
    if mask is None:
        return {"cls": h[:, 0], "last": h[:, -1]}.get(pooling, h.mean(dim=1))
    if pooling in ("cls", "last"):
        # Padding may be on either side.
        place = torch.arange(mask.shape[1], device=mask.device)
        token = (mask * (place + 1 if pooling == "last" else mask.shape[1] - place)).argmax(dim=1)
        return h[torch.arange(len(h), device=h.device), token]
    weight = mask.unsqueeze(-1).to(h.dtype)
    return (h * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


def checked(row: int, item: Any, tower: Tower) -> Any:
    """The item in the form that the processor takes, or an error that names its row."""
    if tower == "text":
        if not isinstance(item, str):
            raise ValueError(
                f"row {row} is {type(item).__name__}, not a string; drop it or turn it into text"
            )
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"row {row} is not valid Unicode: {error}") from error
        return item
    return _checked_image(row, item)


def length(item: Any) -> int:
    """Sort key, so that batches need little padding."""
    return len(item) if isinstance(item, str) else 0


def _checked_image(row: int, item: Any) -> Any:
    from PIL import Image

    if isinstance(item, str | Path):
        try:
            item = read_picture(item)
        except (OSError, ValueError) as error:
            raise ValueError(f"row {row} is not an image that can be read: {error}") from error
    if isinstance(item, Image.Image):
        return item if item.mode == "RGB" else item.convert("RGB")
    if not isinstance(item, np.ndarray | Tensor) or item.ndim != 3 or 3 not in item.shape:
        got = tuple(item.shape) if hasattr(item, "shape") else type(item).__name__
        raise ValueError(
            f"row {row} is not an image; got {got}. Give a PIL image, a file, or an array of "
            "3 channels"
        )
    return item


def _check_sizes(folder: Path) -> None:
    """Refuse settings that make layers much larger than the weights in the folder.

    What has no weights there is made at random, however large it is.
    """
    stored = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    for path in folder.rglob("*.json"):
        if path.name in ("tokenizer.json", "vocab.json"):
            continue
        settings = parse_json(path.read_bytes(), path)
        if path.name == "modules.json":
            _check_modules(path, [module["type"] for module in settings])
        elif path.name == "router_config.json":
            _check_modules(path, list(settings["types"].values()))
        elif isinstance(settings, dict):
            sizes = (settings.get(name, 0) for name in ("in_features", "out_features", "dimension"))
            rows, columns, width = sizes
            if not all(isinstance(size, int) for size in (rows, columns, width)):
                raise ValueError(f"{path} must give the widths of a layer as whole numbers")
            if 4 * max(rows * columns, width) > most_memory(stored):
                raise ValueError(f"{path} asks for {rows} x {columns} weights")
            if path.name == "config.json" and "model_type" in settings:
                config = transformers.AutoConfig.from_pretrained(
                    path.parent, trust_remote_code=False
                )
                check_fits(partial(_auto_model(config).from_config, config), folder)


def _check_modules(path: Path, kinds: list[str]) -> None:
    for kind in kinds:
        package, _, name = kind.rpartition(".")
        if not package.startswith("sentence_transformers.") or name not in MODULES:
            raise ValueError(
                f"{path} names {kind!r:.80}; expected {', '.join(MODULES)} of Sentence "
                f"Transformers. If you trust the folder, pass trust_remote_code=True"
            )


def _config(name: str, trust_remote_code: bool) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if _is_ours(Path(name)):
            what = "it is a model or a run of ncl_multi: use ncl.load"
        elif Path(name).is_dir():
            what = "the folder does not contain a model of transformers"
        else:
            what = "there is no such folder, or name on the hub"
        raise ValueError(f"cannot load an encoder from {name}: {what}. {error}") from error


def _is_ours(folder: Path) -> bool:
    """Whether a folder contains a run or a saved model of this library."""
    if (folder / "model" / "config.json").is_file():
        return True
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return "checkpoint_every" in config or str(config.get("format")).startswith("ncl_multi")


def _tower(config: Any, requested: Tower | None, name: str) -> Tower:
    """Whether a model reads text or images, from its config."""
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        if requested is None:
            raise ValueError(
                f"{name} has a text and an image tower: pass tower='text' or tower='image'"
            )
        return requested
    reads: list[Tower] = []
    if hasattr(config, "vocab_size"):
        reads.append("text")
    elif hasattr(config, "num_channels") or hasattr(config, "image_size"):
        reads.append("image")
    if not reads or requested not in (None, *reads):
        ability = f"reads {reads[0]}s" if reads else "reads neither text nor images"
        raise ValueError(f"{name} ({config.model_type}) {ability}; got tower={requested!r}")
    return reads[0]


def _default_pooling(config: Any, tower: Tower) -> Pooling:
    if tower == "image":
        return "pooler" if config.model_type in _POOLER_MODELS else "cls"
    made_for = (getattr(config, "architectures", None) or [""])[0]
    return "last" if made_for.endswith("ForCausalLM") else "mean"


def _auto_model(config: Any) -> Any:
    # Of an encoder-decoder model, only the first half is an encoder.
    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForTextEncoding
    return transformers.AutoModel


def _is_stock(name: str) -> bool:
    """Whether it is a sentence-transformers model, with its own pooling."""
    if Path(name).is_dir():
        return (Path(name) / "modules.json").is_file()
    modules_file = transformers.utils.cached_file(
        name, "modules.json", _raise_exceptions_for_missing_entries=False
    )
    return modules_file is not None


def _sentence_transformer(name: str, trust_remote_code: bool) -> nn.Module:
    with needs("ncl-multi[sentence]"):
        from sentence_transformers import SentenceTransformer
    return SentenceTransformer(name, trust_remote_code=trust_remote_code, device="cpu")
