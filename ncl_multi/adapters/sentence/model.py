"""`wrap`: any Hugging Face encoder, of text or of images, with a non-negative head."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_array, vstack
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ncl_multi.adapters.sentence.config import SentenceConfig
from ncl_multi.adapters.sentence.corpus import Corpus, cached_features
from ncl_multi.adapters.sentence.encoder import Encoder, Pooling, Tower, checked, length
from ncl_multi.adapters.sentence.objective import SentenceObjective
from ncl_multi.codes.features import to_csr
from ncl_multi.data.towers import encoder_source
from ncl_multi.head import Activation, HeadOptions, NonNegHead, sparse_axes
from ncl_multi.model import SparseModel, check_fits
from ncl_multi.training.batches import Rows

_KS = (8, 16, 32, 64, 128)


def wrap(
    encoder: str | Path | nn.Module,
    dims: int | None = None,
    *,
    pooling: Pooling | None = None,
    tower: Tower | None = None,
    processor: Any = None,
    hidden_dim: int | None = None,
    activation: Activation = "relu",
    batch_norm: bool = False,
    density: float | None = None,
    k: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> "NonNegEncoder":
    """Put a fresh non-negative head on an encoder; its config says whether it reads text or images.

    Args:
        encoder: A name on the hub; `minilm`, `mpnet` or `wordllama`, which come as packages; a
            folder; or a loaded module (of transformers, or a `SentenceTransformer`).
        dims: Width of the codes; None for the encoder's: both directions of half as many axes.
        pooling: `own` is the pooling the model was trained with: the modules of a
            sentence-transformers model, the last token of a decoder, the pooled output of CLIP.
            None takes it if there is one, else the mean of text tokens, or the class token.
            `tokens` puts the head on every token, and a text's code has the largest entries.
        tower: `text` or `image`, for a model that has both, like CLIP.
        processor: Tokenizer or image processor of a loaded module; None loads the one that belongs
            to it.
        hidden_dim: Like the other options up to `k`, for `NonNegHead`.
        activation: See `NonNegHead`.
        batch_norm: See `NonNegHead`. Off, because it gives axes along which texts hardly differ the
            same weight as others, which changes the nearest neighbours.
        density: See `NonNegHead`.
        k: See `NonNegHead`.
        seed: Seed of the initial weights.
        trust_remote_code: Run code that comes with the model. Off unless asked for.
    """
    encoder = encoder_source(encoder) if isinstance(encoder, str) else encoder
    body = Encoder.load(encoder, pooling, tower, processor, trust_remote_code)
    head = HeadOptions(dims or body.width, hidden_dim, activation, batch_norm, density, k)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = head.build(body.width)
    return _class(body.pooling)(body, built)


class NonNegEncoder(
    SparseModel,
    library_name="ncl_multi",
    paper_url="https://arxiv.org/abs/2403.12459",
    tags=["non-negative-contrastive-learning", "sparse-embeddings", "feature-extraction"],
):
    """An encoder with a non-negative head, made by `wrap`.

    `fit` takes texts, documents, pairs, triplets (anchor, positive, negative) or a `Corpus`. The
    encoder stays frozen unless the config says `finetune`. Texts longer than the encoder's window
    are read in passages; their features are the mean.
    """

    kind = "sentence"
    example = 'model.encode(["a cat sleeps", "a kitten naps"])'
    config_type = SentenceConfig
    load_options = ("trust_remote_code",)
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

    def queries(
        self, items: Any, *, batch_size: int | None = None, progress: bool = False
    ) -> csr_array:
        """Signed codes to search with: a dimension may also count against an item.

        They are the head's output before its activation, as unit rows. What is searched stays
        small and non-negative, so `SparseIndex.search` takes them, and finds more by them.
        """
        with self._evaluating():
            head = self.head.fold()
            weights = head[: -1 if self.head.k is None else -2]
            parts = [csr_array((0, self.dims), dtype=np.float32)]
            for h in self._embedded(items, batch_size, progress):
                with torch.inference_mode():
                    parts.append(to_csr(weights(h)))
        return csr_array(vstack(parts, format="csr"))

    def options(self) -> dict[str, Any]:
        head = asdict(self.head.options) | {"in_dim": self.head.in_dim}
        return {"pooling": self.encoder.pooling, "tower": self.encoder.tower, "head": head}

    @classmethod
    def _build(cls, options: dict[str, Any], folder: Path, **load_options: Any) -> "NonNegEncoder":
        trust = load_options.get("trust_remote_code", False)
        encoder = Encoder.load_saved(
            folder / "encoder", options["pooling"], options["tower"], trust
        )
        fresh = partial(_fresh_head, options["head"], encoder.width)
        check_fits(fresh, folder / "head.safetensors")
        return _class(encoder.pooling)(encoder, fresh())

    @classmethod
    def on_base(cls, base: str, options: dict[str, Any]) -> "NonNegEncoder":
        """A fresh head on an encoder that `wrap` takes by this name."""
        encoder = Encoder.load(encoder_source(base), options["pooling"], options["tower"])
        return _class(encoder.pooling)(encoder, _fresh_head(options["head"], encoder.width))

    def base_part(self) -> nn.Module:
        """The encoder."""
        return self.encoder

    def head_part(self) -> nn.Module:
        """The head."""
        return self.head

    def _save_parts(self, folder: Path) -> None:
        self.encoder.save(folder / "encoder")
        state = {name: tensor.cpu().contiguous() for name, tensor in self.head.state_dict().items()}
        save_file(state, folder / "head.safetensors")

    def _load_parts(self, folder: Path) -> None:
        self.head.load_state_dict(load_file(folder / "head.safetensors"))

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        from ncl_multi.training import fit as loop

        if self.encoder.tower != "text":
            raise ValueError("fit needs a text encoder; for images use NonNegVision or NonNegClip")
        corpus = data if isinstance(data, Corpus) else Corpus.of(data, passages=config.passages)
        config = config.for_rows(len(corpus.examples), "examples")
        k = self.head.k
        ks = config.k or (None if k is None else (*(n for n in _KS if n < k), k))
        h = cached_features(self, corpus.sentences, config.precision)
        # In training codes are not cut here: the objective cuts them to each k.
        self.head.k = None
        objective = self._objective(corpus, h, ks, config)
        loader = DataLoader(
            Rows(corpus.examples), config.batch_size, collate_fn=Rows.together, drop_last=True
        )
        # A head on cached features is too small to gain from half precision.
        plan = config if config.finetune else replace(config, precision="fp32")
        try:
            loop.fit(objective, loader, plan, fingerprint=corpus.fingerprint())
        finally:
            self.head.k = max(ks) if ks else k
        self.encoder.to(self.device)
        return {"data": corpus.name, "sentences": len(corpus.sentences)}

    def _objective(self, corpus: Corpus, h: Tensor, ks: Any, config: Any) -> SentenceObjective:
        """The objective, after the head was started."""
        if self.head.hidden_dim is None and config.start != "random":
            mean = h.mean(dim=0)
            if config.start == "axes":
                self.head.start_at(both_directions(h - mean, self.head.out_dim))
            else:
                self.head.start_on(h - mean, config.start)
            self.head.centre_on(mean)
        return SentenceObjective(self if config.finetune else self.head, corpus, h, ks, config)

    def _embedded(
        self,
        items: Any,
        batch_size: int | None,
        progress: bool,
        read: Callable[[list[Any]], Tensor] | None = None,
        join: Callable[[Tensor, np.ndarray, int], Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """What `read` makes of items, by default their features; passages joined by their mean."""
        read, join = read or self._features, join or _means
        if isinstance(items, str | bytes):
            raise ValueError("encode takes a list of items; got one string: put it in a list")
        size = batch_size or 64
        total = len(items) if hasattr(items, "__len__") else None
        numbered = enumerate(items)
        with tqdm(total=total, unit="item", disable=not progress, delay=2) as bar:
            while window := list(islice(numbered, size * self.window)):
                ready = [checked(row, item, self.encoder.tower) for row, item in window]
                pieces, owners = self._pieces(ready)
                # Longest first: a batch that does not fit in memory fails at once.
                order = np.argsort([-length(piece) for piece in pieces], kind="stable")
                parts, reported = [], 0
                for start in range(0, len(pieces), size):
                    rows = order[start : start + size]
                    with torch.inference_mode():
                        h = read([pieces[row] for row in rows])
                    bad = (~h.isfinite().all(dim=1)).nonzero()
                    if len(bad):
                        row = window[owners[rows[int(bad[0])]]][0]
                        raise ValueError(f"the encoder gives NaN or infinity for row {row}")
                    parts.append(h)
                    done = (start + len(rows)) * len(window) // len(pieces)
                    bar.update(done - reported)
                    reported = done
                yield join(torch.cat(parts)[np.argsort(order)], owners, len(window))

    def _pieces(self, items: list[Any]) -> tuple[list[Any], np.ndarray]:
        """Inputs of the encoder, long texts in passages, and the row that each belongs to."""
        if self.encoder.tower != "text":
            return items, np.arange(len(items))
        passages = [self.encoder.passages(text) for text in items]
        owners = np.repeat(np.arange(len(items)), [len(pieces) for pieces in passages])
        return [passage for pieces in passages for passage in pieces], owners

    def _features(self, items: list[Any]) -> Tensor:
        inputs = self.encoder.prepare(items)
        device = self.encoder.device
        return self.encoder({name: tensor.to(device) for name, tensor in inputs.items()}).float()

    def _encoder_name(self) -> str:
        return f"{type(self.encoder.model).__name__}, {self.encoder.pooling} pooling"

    def _display(self, items: Iterable[Any]) -> dict[str, Any]:
        return {"items": list(items)} if self.encoder.tower == "text" else {}


def _class(pooling: Pooling) -> type[NonNegEncoder]:
    """The class of models with this pooling."""
    if pooling != "tokens":
        return NonNegEncoder
    from ncl_multi.adapters.sentence.tokens import NonNegTokens

    return NonNegTokens


def _fresh_head(options: dict[str, Any], width: int) -> NonNegHead:
    # Version 0.1 called the width of the codes out_dim.
    head_options = {name: value for name, value in options.items() if name != "in_dim"}
    head_options["dims"] = head_options.pop("out_dim", head_options.get("dims"))
    if options.get("in_dim", width) != width:
        raise ValueError(
            f"the head takes {options['in_dim']} features, this encoder gives {width}: they "
            f"belong to different models"
        )
    return HeadOptions(**head_options).build(width)


def both_directions(
    x: Float[Tensor, "n width"], dims: int, most: int = 20_000
) -> Float[Tensor, "directions width"]:
    """`dims` directions: both of half as many axes, along which the features are sparse.

    The axes turn within the leading principal axes: what the others hold would only take entries
    from the rest. Those of little variance are lengthened, by its eighth root, so that a few broad
    ones do not take the first entries of every row. They are those of `most` random rows.

    Example:
        >>> x = torch.tensor([[3.0, 0.0, 0.1], [0.0, 2.0, 0.0], [-3.0, 0.0, 0.0], [0.0, -2.0, 0.0]])
        >>> both_directions(x, 4).abs().round()
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [1., 0., 0.],
                [0., 1., 0.]])
    """
    sample = x if len(x) <= most else x[torch.randperm(len(x))[:most]]
    variances, principal = torch.linalg.eigh(sample.T @ sample)
    variances, principal = variances.flip(0)[: max(1, dims // 2)], principal.flip(1)
    # Rows of few kinds have axes without variance; equal rows have no others.
    variances = variances.clamp_min(max(1e-6 * float(variances[0]), 1e-12))
    variances = variances / variances[0]
    leading = principal[:, : len(variances)] * variances**-0.125
    turned = normalize(sample @ leading, dim=1)
    axes = _for_few_entries(turned, sparse_axes(turned)) @ leading.T
    return torch.cat([axes, -axes])[:dims]


def _for_few_entries(
    x: Float[Tensor, "n d"], axes: Float[Tensor, "d d"], steps: int = 20
) -> Float[Tensor, "d d"]:
    """The axes turned so that few entries of a row contain more of it, on average over several k.

    Each step is the best rotation of the rows towards what their largest entries say.
    """
    ks = [k for k in _KS[:4] if k < len(axes)]
    for _ in range(steps if ks else 0):
        entries = x @ axes.T
        largest = entries.abs().topk(ks[-1], dim=1).values
        kept = torch.stack([entries * (entries.abs() >= largest[:, [k - 1]]) for k in ks])
        left, _, right = torch.linalg.svd(kept.sum(dim=0).T @ x)
        axes = left @ right
    return axes


def _means(h: Tensor, owners: np.ndarray, count: int) -> Tensor:
    """The mean of the rows of each owner, scaled to their average length."""
    if len(h) == count:
        return h
    owner = torch.from_numpy(owners).to(h.device)
    size = torch.bincount(owner, minlength=count)[:, None]
    mean = torch.zeros(count, h.shape[1], device=h.device).index_add_(0, owner, h) / size
    length = torch.zeros(count, 1, device=h.device)
    length = length.index_add_(0, owner, h.norm(dim=1, keepdim=True)) / size
    return torch.where(size > 1, normalize(mean, dim=1) * length, mean)
