"""The contract of every model: fit, encode, embed, features, shorten, save and load."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from textwrap import shorten as shorten_text
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_model, save_model
from scipy.sparse import csr_array, vstack
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ncl_multi.codes.features import Features, to_csr
from ncl_multi.codes.shorten import shorten
from ncl_multi.distributed import is_main
from ncl_multi.files import atomic_folder, check_keys, most_memory, read_json
from ncl_multi.head import NonNegHead, TopK, top_k
from ncl_multi.optional import needs
from ncl_multi.settings import offline
from ncl_multi.training.config import TrainConfig

with needs("ncl-multi[train]"):
    from huggingface_hub import ModelHubMixin, snapshot_download

FORMAT = "ncl_multi.model/2"
_KINDS = {
    "coder": "ncl_multi.coder:SparseCoder",
    "clip": "ncl_multi.adapters.clip.model:NonNegClip",
    "graph": "ncl_multi.adapters.graph.model:NonNegGraph",
    "sentence": "ncl_multi.adapters.sentence.model:NonNegEncoder",
    "vision": "ncl_multi.adapters.vision.model:NonNegVision",
    "classifier": "ncl_multi.adapters.vision.model:NonNegClassifier",
}
_MOST_MODULES = 10_000
_KEYS = ("format", "kind", "options", "trained_on", "figures")
_ADVICE = (
    "ncl.load takes the folder of a finished run, its model/ folder, or a name on the hub; "
    "ncl.wrap puts a new head on an encoder"
)
_OF_ANOTHER_NETWORK = (
    "It was saved by version 0.1, in which this network had other layers: train it again with fit, "
    "or save the codes you need as Features with ncl-multi 0.1, which this version reads"
)
Model = TypeVar("Model", bound="SparseModel")


class UntrainedWarning(UserWarning):
    """A head that has not been trained was used to encode."""


class SparseModel(nn.Module, ModelHubMixin, library_name="ncl_multi"):
    """An encoder with a non-negative head: the base of sentence, CLIP, vision and graph models.

    An adapter defines how items become features (`_embedded`), which head reads them (`_head`), how
    it is trained (`_fit`, `config_type`) and how it is built again (`options`, `_build`).
    """

    kind: ClassVar[str]
    example: ClassVar[str]
    """A line of the model card that encodes something."""
    config_type: ClassVar[type[TrainConfig]] = TrainConfig
    load_options: ClassVar[tuple[str, ...]] = ()
    """Options of `load` for this kind of model."""

    def __init__(self) -> None:
        super().__init__()
        self.trained_on: dict[str, Any] | None = None
        """What `fit` was given; None before."""
        self.figures: dict[str, Any] = {}
        """Measurements that the model card shows."""

    def fit(self: Model, data: Any, config: TrainConfig | None = None, **options: Any) -> Model:
        """Train on `data` and return the model itself.

        Args:
            data: What the adapter trains on; see its class.
            config: How to train: a `config_type`, or a `TrainConfig` of which only changed fields
                count. With `config.out` the run is written to that folder and resumes there, and
                the model is saved in its `model/`; without, nothing is written.
            options: Fields of the config to change, such as `epochs=20`.
        """
        config = replace(self._own_config(config), **options).on_this_machine()
        # Seeded here, so that the objective does not depend on earlier draws.
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            about = self._fit(data, config)
        self.trained_on = about | {"seed": config.seed}
        if config.out is not None and is_main():
            self.save_pretrained(config.out / "model")
        return self.eval()

    def encode(
        self,
        items: Any,
        *,
        k: int | None = None,
        dense: bool = False,
        batch_size: int | None = None,
        progress: bool = False,
    ) -> csr_array | Tensor:
        """Unit codes of items, in their order: a `csr_array`, or a tensor if `dense`.

        `k` keeps the k largest entries of a row, also if the head was trained to keep fewer:
        queries can have more entries than documents, which needs no storage.
        """
        parts = self.stream(items, k=k, batch_size=batch_size, progress=progress)
        none = csr_array((0, self.dims), dtype=np.float32)
        codes = vstack([none, *parts], format="csr")
        return torch.from_numpy(codes.toarray()) if dense else codes

    def stream(
        self,
        items: Any,
        *,
        k: int | None = None,
        batch_size: int | None = None,
        progress: bool = False,
    ) -> Iterator[csr_array]:
        """As `encode`, a batch of rows at a time: for more items than fit in memory."""
        self._check_can_encode(k)
        with self._evaluating():
            head = self._head(items)
            if k is not None and isinstance(head, nn.Sequential) and isinstance(head[-1], TopK):
                head = head[:-1]
            for h in self._embedded(items, batch_size, progress):
                with torch.inference_mode():
                    z = head(h)
                yield to_csr(z if k is None else top_k(z, k))

    def embed(
        self, items: Any, *, batch_size: int | None = None, progress: bool = False
    ) -> Float[Tensor, "n width"]:
        """The encoder's output, before the head, on the CPU."""
        with self._evaluating():
            parts = [h.float().cpu() for h in self._embedded(items, batch_size, progress)]
        return torch.cat(parts) if parts else torch.zeros(0, self._heads()[0].in_dim)

    def features(self, items: Any, *, y: Tensor | None = None, split: str = "test") -> Features:
        """Codes of items with their texts or thumbnails, and their provenance."""
        about = {
            "kind": self.kind, "split": split, "output": "head", "normalised": True,
            "activation": self._heads()[0].activation, "trained_on": self.trained_on,
        }  # fmt: skip
        return Features(self.encode(items), y, about=about, **self._display(items))

    def shorten(self: Model, dims: int, features: Any) -> Model:
        """A copy with only the `dims` most important dimensions of these codes."""
        return shorten(self, dims, features)

    def signed_twin(self: Model) -> Model:
        """The same model with a signed head: same weights to start from, nothing non-negative."""
        if self.trained_on is not None:
            raise ValueError(
                "make the twin before the model is trained: it starts from its weights"
            )
        twin = deepcopy(self)
        for module in list(twin.modules()):
            for name, head in module.named_children():
                if isinstance(head, NonNegHead):
                    setattr(module, name, head.signed())
        twin._became_signed()
        return twin

    @property
    def dims(self) -> int:
        """Width of the codes."""
        return self._heads()[0].out_dim

    @property
    def device(self) -> torch.device:
        """Where the head is."""
        return self._heads()[0].out.weight.device

    @property
    def trained(self) -> bool:
        """Whether the head was trained, by `fit` or by your own loop."""
        return self.trained_on is not None or self._heads()[0].trained

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *, push_to_hub: bool = False, **hub: Any
    ) -> str | None:
        """Write the model to a folder, atomically; with `push_to_hub` also to the hub."""
        folder = Path(save_directory)
        with atomic_folder(folder) as unfinished:
            self._save_parts(unfinished)
            write_config(unfinished, self.kind, self.options(), self.trained_on, self.figures)
            # To push, the mixin saves to `<somewhere>/<user>/<name>`, with this argument.
            name = "/".join(folder.parts[-2:]) if "model_card_kwargs" in hub else str(folder)
            (unfinished / "README.md").write_text(self.card(f'ncl.load("{name}")'))
        if not push_to_hub:
            return None
        return self.push_to_hub(hub.pop("repo_id", folder.name), **hub)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[Model], pretrained_model_name_or_path: str | Path, **options: Any
    ) -> Model:
        """A model that `save_pretrained` wrote; see `load`."""
        return load_as(pretrained_model_name_or_path, cls, **options)

    # What adapters provide.

    def options(self) -> dict[str, Any]:
        """Arguments from which `_build` makes the model again."""
        raise NotImplementedError

    @classmethod
    def _build(
        cls: type[Model], options: dict[str, Any], folder: Path, **load_options: Any
    ) -> Model:
        """A model with these options and the folder's settings; its weights are not loaded yet."""
        check_fits(lambda: cls(**options), folder / "model.safetensors")
        return cls(**options)

    @classmethod
    def on_base(cls: type[Model], base: str, options: dict[str, Any]) -> Model:
        """A model with these options and a fresh head on the encoder of this name."""
        raise ValueError(f"a {cls.__name__} is trained whole: save it with save_pretrained")

    def base_part(self) -> nn.Module:
        """The encoder, without which a head may be stored."""
        raise ValueError(f"a {type(self).__name__} is trained whole: save it with save_pretrained")

    def head_part(self) -> nn.Module:
        """The part that is trained if the encoder is frozen."""
        raise ValueError(f"a {type(self).__name__} is trained whole: save it with save_pretrained")

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        """Train; return a short description of the data as JSON values."""
        raise NotImplementedError

    def _embedded(self, items: Any, batch_size: int | None, progress: bool) -> Iterator[Tensor]:
        """The encoder's output of items in their order, a batch of rows at a time."""
        raise NotImplementedError

    def _head(self, items: Any) -> nn.Module:
        """The head that serves these items."""
        return self._heads()[0].fold()

    def _display(self, items: Any) -> dict[str, Any]:
        """Texts or thumbnails of items, as `Features` takes them."""
        return {}

    def _encoder_name(self) -> str:
        """Name of the encoder in the model card."""
        return str(getattr(self, "name", None) or "your own")

    def _became_signed(self) -> None:
        """Called on a twin after its heads were replaced."""

    def _save_parts(self, folder: Path) -> None:
        save_model(self, str(folder / "model.safetensors"))

    def _load_parts(self, folder: Path) -> None:
        load_model(self, folder / "model.safetensors")

    def _entries(self) -> int | None:
        """Entries that a code keeps; None for all that are not zero."""
        return self._heads()[0].k

    def _heads(self) -> list[NonNegHead]:
        return [module for module in self.modules() if isinstance(module, NonNegHead)]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def _own_config(self, config: TrainConfig | None) -> TrainConfig:
        """The config as a `config_type`, with its defaults for all fields that were not set."""
        if isinstance(config, self.config_type):
            return config
        if config is not None and type(config) is not TrainConfig:
            raise TypeError(
                f"{type(self).__name__} is trained with a {self.config_type.__name__}; got a "
                f"{type(config).__name__}"
            )
        values = {} if config is None else {f.name: getattr(config, f.name) for f in fields(config)}
        plain = TrainConfig()
        return self.config_type(
            **{name: value for name, value in values.items() if value != getattr(plain, name)}
        )

    def _check_can_encode(self, k: int | None) -> None:
        """Refuse a `k` beyond the codes' width; warn of an untrained head."""
        if k is not None and not 1 <= k <= self.dims:
            raise ValueError(f"k must lie in 1..{self.dims}, the codes' width; got {k}")
        if not self.trained:
            warnings.warn(
                f"this head is untrained: its dimensions mean nothing yet. Call "
                f"{type(self).__name__}.fit(...), or load a trained model with ncl.load(...)",
                UntrainedWarning,
                stacklevel=3,
            )

    def card(self, call: str, figures: dict[str, Any] | None = None) -> str:
        """The model card; `call` is the code that loads the model."""
        figures = self.figures if figures is None else figures
        head = self._heads()[0]
        about = {
            "encoder": self._encoder_name(), "dimensions": self.dims,
            "head": f"activation={head.activation!r}, density={head.density}, k={self._entries()}",
        }  # fmt: skip
        return _CARD.format(
            metadata=self._hub_mixin_info.model_card_data.to_yaml(),
            kind=self.kind,
            call=call,
            example=self.example,
            about=_table(about, "part"),
            trained_on=_table(self.trained_on, "data") if self.trained_on else "Not trained yet.",
            figures=_table(figures, "measure") if figures else "Not measured.",
        )


def load(source: str | Path, **options: Any) -> Any:
    """A trained model of any kind: from a run folder, its `model/` folder, or the hub.

    Nothing in the files is executed. `trust_remote_code=True` lets a sentence encoder run the code
    that comes with it.

    Example:
        >>> import tempfile
        >>> from ncl_multi import SparseCoder
        >>> coder = SparseCoder(dims=16, k=4, steps=2).fit(np.random.default_rng(0).random((20, 8)))
        >>> load(coder.save(Path(tempfile.mkdtemp()) / "model")).dims
        16
    """
    return load_as(source, object, **options)


def model_class(kind: str) -> Any:
    """The class of models of this kind."""
    module, _, name = _KINDS[kind].partition(":")
    return getattr(import_module(module), name)


def fingerprint(model: nn.Module) -> str:
    """A hash of the weights: the same for the same features, whatever the model is called."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def write_config(
    folder: Path,
    kind: str,
    options: dict[str, Any],
    trained_on: dict[str, Any] | None,
    figures: dict[str, Any] | None = None,
) -> None:
    """Write the `config.json` from which `load` builds the model."""
    config = {
        "format": FORMAT, "kind": kind, "options": options, "trained_on": trained_on,
        "figures": figures or {},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))


def load_as(source: str | Path, expected: type[Any], **options: Any) -> Any:
    """As `load`, if the model is of the expected class."""
    folder = _folder(source, options)
    with _one_error(source):
        config = _read_config(folder)
    cls = model_class(config["kind"])
    if unknown := options.keys() - set(cls.load_options):
        raise TypeError(f"{cls.__name__} is loaded without the option {', '.join(sorted(unknown))}")
    # Trusted code may be on the hub.
    online = options.get("trust_remote_code", False)
    advice = _OF_ANOTHER_NETWORK if config["trained_on"] == {"version": "0.1"} else _ADVICE
    with _one_error(source, advice), nullcontext() if online else offline():
        if not issubclass(cls, expected):
            raise ValueError(f"it contains a {cls.__name__}, not a {expected.__name__}")
        model = cls._build(config["options"], folder, **options)
        model._load_parts(folder)
    model.trained_on = config["trained_on"]
    model.figures = config["figures"]
    return model.eval() if isinstance(model, SparseModel) else model


@contextmanager
def _one_error(source: str | Path, advice: str = _ADVICE) -> Iterator[None]:
    """Turn any error of a folder into a `ValueError` that says what to do."""
    try:
        yield
    except Exception as error:  # Libraries that read its parts may raise anything.
        words = f"config.json lacks {error}" if isinstance(error, KeyError) else str(error)
        # Weights that do not fit are listed one by one: the first few are enough.
        reason = shorten_text(words, 800, placeholder=" ...")
        raise ValueError(
            f"{source} does not contain a model written by save_pretrained: {reason}. {advice}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ValueError("it has no config.json")
    config = read_json(folder / "config.json")
    if "checkpoint_every" in config:
        raise ValueError("it is the folder of a run that has not ended, so it has no model yet")
    if "model_type" in config:
        raise ValueError(f"it is a model of transformers ({config['model_type']})")
    if config.get("format") != FORMAT:
        return _of_version_1(folder, config)
    check_keys(config, _KEYS, (), folder / "config.json")
    if config["kind"] not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}; got {config['kind']!r}")
    if not isinstance(config["options"], dict) or not isinstance(config["figures"], dict):
        raise ValueError("options and figures in its config must be objects")
    return config


def check_fits(make: Callable[[], nn.Module], weights: Path) -> None:
    """Refuse settings that make a module much larger than its file of weights.

    It is built on the meta device first: a small config may ask for any amount of numbers or
    layers. `weights` may be a folder with several files.
    """
    files = weights.rglob("*.safetensors") if weights.is_dir() else [weights]
    size = sum(file.stat().st_size for file in files)
    most, layers = _MOST_MODULES + size // 1000, 0

    def count(*module: Any) -> None:
        nonlocal layers
        layers += 1
        if layers > most:
            raise ValueError(f"its config asks for more than {most} modules; {weights} has {size}")

    counting = register_module_module_registration_hook(count)
    try:
        with torch.device("meta"):
            blank = make()
    finally:
        counting.remove()
    # Also buffers that are not stored, such as the mask of all positions.
    tensors = (*blank.parameters(), *blank.buffers())
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if needed > most_memory(size):
        raise ValueError(f"its config asks for {needed} bytes of weights; {weights} has {size}")


def _folder(source: str | Path, options: dict[str, Any]) -> Path:
    path = Path(source)
    if path.is_dir():
        return path / "model" if (path / "model" / "config.json").is_file() else path
    if path.exists() or isinstance(source, Path) or str(source).count("/") != 1:
        raise ValueError(f"{source} is not a folder. {_ADVICE}")
    hub_options = ("revision", "cache_dir", "force_download", "local_files_only", "token")
    hub = {name: options.pop(name) for name in hub_options if name in options}
    try:
        return Path(snapshot_download(str(source), **hub))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source} is neither a folder nor a model on the hub: {error}. {_ADVICE}"
        ) from error


def _table(values: dict[str, Any], of: str) -> str:
    rows = (f"| {name} | {value} |" for name, value in values.items())
    return "\n".join([f"| {of} | |", "|---|---|", *rows])


def _of_version_1(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model saved by version 0.1, as this version writes it."""
    kind, options, figures = "", config, {}
    if config.get("format") == "ncl_multi.encoder/1":
        head = config["head"]
        options = {"pooling": config["pooling"], "tower": config["tower"], "head": head}
        kind = "sentence"
    elif (folder / "towers").is_dir():
        kind, figures = "clip", config["figures"]
        options = {"dims": config["dims"], "options": config["options"]}
    elif "classes" in config:
        kind = "classifier"
    elif "size" in config:
        kind, options = "vision", config | {"pretrained": False}
    elif "in_dim" in config:
        kind = "graph"
        options = {**config, "width": config.get("hidden_dim", 256)}
        options.pop("hidden_dim", None)
    else:
        raise ValueError(f"config.json has the format {config.get('format')!r}, not {FORMAT!r}")
    return {
        "format": FORMAT, "kind": kind, "options": options, "figures": figures,
        "trained_on": {"version": "0.1"},
    }  # fmt: skip


_CARD = """---
{metadata}
---

# Non-negative {kind} codes

Sparse codes trained with [non-negative contrastive learning](https://arxiv.org/abs/2403.12459): no
entry is below zero, most are exactly zero, and a dimension fires for one kind of thing.

```python
import ncl_multi as ncl

model = {call}
codes = {example}
```

`codes` is a `scipy.sparse.csr_array` with unit rows, one per item.

## What it is

{about}

## Trained on

{trained_on}

## Measured

{figures}
"""
