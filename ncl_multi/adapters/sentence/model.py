"""`wrap`: any Hugging Face encoder, of text or of images, with a non-negative head."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_array, vstack
from torch import Tensor, nn

from ncl_multi.adapters.sentence.encoder import Encoder, Pooling, Tower, checked, length
from ncl_multi.codes.features import to_csr
from ncl_multi.files import atomic
from ncl_multi.head import Activation, NonNegHead, top_k

try:
    from huggingface_hub import ModelHubMixin, snapshot_download
    from tqdm.auto import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("needs transformers: pip install 'ncl-multi[sentence]'") from error

FORMAT = "ncl_multi.encoder/1"


def wrap(
    encoder: str | Path | nn.Module,
    dims: int = 4096,
    *,
    pooling: Pooling | None = None,
    tower: Tower | None = None,
    processor: Any = None,
    hidden_dim: int | None = None,
    activation: Activation = "relu",
    batch_norm: bool = True,
    density: float | None = None,
    k: int | None = None,
    trust_remote_code: bool = False,
) -> "NonNegEncoder":
    """Put a fresh non-negative head on an encoder; its config says whether it reads text or images.

    Args:
        encoder: A name on the hub, a folder, or a loaded module (of transformers, or a
            `SentenceTransformer`).
        dims: Width of the codes.
        pooling: `own` is what the model was made with: the modules of a sentence-transformers
            model, the last token of a decoder, the pooled output of CLIP. None takes it where there
            is one, else the mean of text tokens, or the class token of an image.
        tower: Which half of a model that has both, like CLIP.
        processor: Tokenizer or image processor of a loaded module; None loads the one that belongs
            to it.
        hidden_dim: Like the other options up to `k`, for `NonNegHead`.
        activation: See `NonNegHead`.
        batch_norm: See `NonNegHead`.
        density: See `NonNegHead`.
        k: See `NonNegHead`.
        trust_remote_code: Run code that comes with the model. Off unless asked for.
    """
    body = Encoder.load(encoder, pooling, tower, processor, trust_remote_code)
    head = NonNegHead(
        body.width, dims, hidden_dim=hidden_dim, activation=activation, batch_norm=batch_norm,
        density=density, k=k,
    )  # fmt: skip
    return NonNegEncoder(body, head)


class NonNegEncoder(
    nn.Module,
    ModelHubMixin,
    library_name="ncl_multi",
    paper_url="https://arxiv.org/abs/2403.12459",
    tags=["non-negative-contrastive-learning", "sparse-embeddings", "feature-extraction"],
):
    """An encoder with a non-negative head. Made by `wrap`; saved, loaded and pushed by itself."""

    # Items are read, sorted by length and encoded this many batches at a time.
    window = 64

    def __init__(self, encoder: Encoder, head: NonNegHead):
        super().__init__()
        if head.in_dim != encoder.width:
            raise ValueError(
                f"the head takes {head.in_dim} features, this encoder gives {encoder.width}: they "
                f"belong to different models"
            )
        self.encoder, self.head = encoder, head

    def forward(self, inputs: dict[str, Tensor]) -> Float[Tensor, "n dims"]:
        """Codes of a batch that `encoder.prepare` made."""
        return self.head(self.encoder(inputs))

    def encode(
        self,
        items: Iterable[Any],
        *,
        k: int | None = None,
        dense: bool = False,
        batch_size: int = 64,
        progress: bool = True,
    ) -> csr_array | Tensor:
        """Unit codes of sentences (or images), in their order, sparse unless `dense` is asked for.

        Any iterable will do: it is read a window at a time, and sorted by length within it, so a
        generator of any length needs memory for its codes only. `k` keeps the largest k of a row.
        An item that is no sentence (or image) is refused with its row number.
        """
        windows = self.stream(items, k=k, batch_size=batch_size, progress=progress)
        codes = vstack([csr_array((0, self.head.out_dim), dtype=np.float32), *windows], "csr")
        return torch.from_numpy(codes.toarray()) if dense else codes

    def stream(
        self,
        items: Iterable[Any],
        *,
        k: int | None = None,
        batch_size: int = 64,
        progress: bool = True,
    ) -> Iterator[csr_array]:
        """What `encode` gives, a few thousand rows at a time: for more items than fit in memory."""
        if k is not None and not 1 <= k <= self.head.out_dim:
            raise ValueError(f"k must lie in 1..{self.head.out_dim}, the codes' width; got {k}")
        head = self.head.fold()

        def code(h: Tensor) -> csr_array:
            z = head(h)
            return to_csr(z if k is None else top_k(z, k))

        for parts, back in self._windows(items, code, batch_size, progress):
            yield vstack(parts, format="csr")[back]

    def embed(
        self, items: Iterable[Any], *, batch_size: int = 64, progress: bool = True
    ) -> Float[Tensor, "n width"]:
        """What the head gets to see: the encoder's own vectors, on the CPU, to be cached."""
        windows = [
            torch.cat(parts)[back]
            for parts, back in self._windows(items, lambda h: h.cpu(), batch_size, progress)
        ]
        return torch.cat([torch.zeros(0, self.encoder.width), *windows])

    def _windows(
        self, items: Iterable[Any], finish: Callable, batch_size: int, progress: bool
    ) -> Iterator[tuple[list[Any], np.ndarray]]:
        """The finished batches of each window, and the order that sorts their rows back."""
        if isinstance(items, str | bytes):
            raise ValueError("encode takes a list of items; got one string: put it in a list")
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
        read = enumerate(items)
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            with tqdm(total=total, unit="item", disable=not progress, delay=2) as bar:
                while window := list(islice(read, batch_size * self.window)):
                    ready = [checked(row, item, self.encoder.tower) for row, item in window]
                    # Longest first: a batch that does not fit in memory fails at once.
                    order = np.argsort([-length(item) for item in ready], kind="stable")
                    parts = []
                    for start in range(0, len(ready), batch_size):
                        rows = order[start : start + batch_size]
                        with torch.inference_mode():
                            h = self._features([ready[row] for row in rows])
                            bad = (~h.isfinite().all(dim=1)).nonzero()
                            if len(bad):
                                row = window[rows[int(bad[0])]][0]
                                raise ValueError(f"the encoder gives NaN or infinity for row {row}")
                            parts.append(finish(h))
                        bar.update(len(rows))
                    yield parts, np.argsort(order)
        finally:
            for module in training:
                module.training = True

    def _features(self, items: list[Any]) -> Tensor:
        inputs = self.encoder.prepare(items)
        device = self.encoder.device
        return self.encoder({name: part.to(device) for name, part in inputs.items()}).float()

    def _save_pretrained(self, save_directory: Path) -> None:
        head = self.head
        shape = {
            "in_dim": head.in_dim, "out_dim": head.out_dim, "hidden_dim": head.hidden_dim,
            "activation": head.activation, "batch_norm": head.norm is not None,
            "density": head.density, "k": head.k,
        }  # fmt: skip
        about = {
            "format": FORMAT,
            "pooling": self.encoder.pooling,
            "tower": self.encoder.tower,
            "head": shape,
        }
        self.encoder.save(save_directory / "encoder")
        with atomic(save_directory / "head.safetensors") as unfinished:
            state = {name: part.cpu().contiguous() for name, part in head.state_dict().items()}
            save_file(state, unfinished)
        with atomic(save_directory / "config.json") as unfinished:
            unfinished.write_text(json.dumps(about, indent=2))

    @classmethod
    def _from_pretrained(  # type: ignore[override]
        cls, *, model_id: str, trust_remote_code: bool = False, **hub: Any
    ) -> "NonNegEncoder":
        folder = Path(model_id)
        if not folder.is_dir():
            folder = Path(snapshot_download(model_id, **hub))
        try:
            about = json.loads((folder / "config.json").read_text())
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']}, not {FORMAT}")
            weights = load_file(folder / "head.safetensors")
            head = NonNegHead(**about["head"])
            head.load_state_dict(weights)
        except (OSError, KeyError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
            raise ValueError(
                f"{model_id} holds no model written by save_pretrained: {error!r}. To put a head "
                f"on another encoder, call ncl_multi.adapters.sentence.model"
            ) from error
        encoder = Encoder.load(
            folder / "encoder", about["pooling"], about["tower"],
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        return cls(encoder, head).eval()
