"""`SparseCoder`: sparse, readable codes of embeddings you already have, for scikit-learn."""

from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.sparse import csr_array, issparse, vstack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ncl_multi.atlas.page import write_atlas
from ncl_multi.codes.features import Features
from ncl_multi.codes.names import MIXED, name_dimensions
from ncl_multi.codes.rebuild import LinearDecoder, ridge
from ncl_multi.data.shards import Shards, is_column
from ncl_multi.files import Expected, atomic_folder, read_safetensors
from ncl_multi.head import NonNegHead
from ncl_multi.metrics.findings import Finding, findings
from ncl_multi.model import check_fits, load_as, write_config
from ncl_multi.optional import needs
from ncl_multi.training.batches import Rows
from ncl_multi.training.config import TrainConfig
from ncl_multi.training.embeddings import (
    EmbeddingObjective,
    Examples,
    read_examples,
    start_heads,
    unit_embeddings,
)

with needs("ncl-multi[train]"):
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
    from tqdm.auto import tqdm

FILE_FORMAT = "ncl_multi.coder/1"
_IMITATION = {1: 10.0, 2: 1.0}
"""Weight of the imitation by the number of sides."""
_DECODED = 20_000
"""Rows that a decoder is fitted on."""
_DETAILS = 2.0
"""Weight of a query's products with the atoms; the head's code has one."""
_KEPT = 4096
"""Rows that `partial_fit` keeps of all it has seen, to measure the codes on."""


class Topic(NamedTuple):
    """A dimension that is active for a row, and its share of the row."""

    dimension: int
    name: str
    share: float


class SparseCoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Sparse non-negative codes of embeddings, learnt by contrast.

    Rows that belong together get similar codes: pairs or groups if they are given, else nearest
    neighbours with noise. An additional term lets codes imitate the cosines of the embeddings.
    Codes are trained for several numbers of entries at once, so `transform(x, k=8)` needs no new
    training. Only the direction of a row matters; a row of zeros has a code of zeros.

    Wherever embeddings are asked for, `x` may be an array, a tensor, a sparse matrix, a column of
    `datasets` or pandas, a `.npy`, `.npz` or parquet file, or a list of such files. Memmaps and
    files are read a block at a time. `ncl_multi.data.shards.Shards(file, name="...")` says which
    column of a parquet file, if there are several.

    Args:
        dims: Width of the codes.
        k: Active entries of a code.
        k_query: Active entries of a code that searches, `transform(x, query=True)`; None is
            `4 * k`. Documents stay as small as `k`, and fuller queries find more. A query is the
            sum of two unit codes: the head's, and with twice the weight the query's products with
            what each dimension rebuilds of an embedding. With two sides it is the head's only.
        idf: Weigh the entries of a query by how rare a dimension is among the rows given to `fit`.
        ks: Numbers of entries to train for; None for powers of two from 4 to `2 * k`, and `k`.
        steps: Training steps of `fit`.
        batch_size: Rows of a step; fewer if there are fewer rows.
        learning_rate: Highest learning rate.
        temperature: Temperature of the contrast and of the additional term.
        imitation: Weight of the additional term, by which codes imitate the similarities of their
            embeddings, or of two sides short codes those of whole ones; None is 10, or 1.
        noise: Length of the noise that is added to a row in training, as a share of its own.
        neighbours: Positives are drawn from this many nearest rows, the nearer, the likelier.
        max_rows: `fit` learns from at most this many rows, drawn at random, to bound the memory.
        verbose: Show progress bars.
        random_state: Seed of everything random. The same one gives the same codes, bit for bit, on
            one machine with one number of threads; other rounding acts like another seed.

    Attributes:
        heads_: The trained head; two for two-sided data.
        idf_: Weight of each dimension in a query.
        reconstruction_error_: Squared error of `inverse_transform`, as a share of the variance, on
            rows that the decoder was not fitted on (if there are at least 20 rows).
        names_: Names of the dimensions, after `name`.

    Example:
        >>> x = np.random.default_rng(0).standard_normal((50, 8))
        >>> codes = SparseCoder(dims=32, k=4, steps=5, random_state=0).fit_transform(x)
        >>> codes.shape, int(np.diff(codes.indptr).max())
        ((50, 32), 4)
    """

    load_options = ()
    heads_: Any
    n_rows_: int
    _seen: tuple[csr_array, np.ndarray]

    def __init__(
        self,
        dims: int = 2048,
        k: int = 32,
        *,
        k_query: int | None = None,
        idf: bool = False,
        ks: Sequence[int] | None = None,
        steps: int = 300,
        batch_size: int = 256,
        learning_rate: float = 2e-3,
        temperature: float = 0.05,
        imitation: float | None = None,
        noise: float = 0.1,
        neighbours: int = 16,
        max_rows: int = 100_000,
        verbose: bool = False,
        random_state: Any = None,
    ):
        self.dims = dims
        self.k = k
        self.k_query = k_query
        self.idf = idf
        self.ks = ks
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.temperature = temperature
        self.imitation = imitation
        self.noise = noise
        self.neighbours = neighbours
        self.max_rows = max_rows
        self.verbose = verbose
        self.random_state = random_state

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any = None,
        *,
        positives: Any = None,
        groups: Any = None,
        other: Any = None,
    ) -> "SparseCoder":
        """Learn codes of these embeddings.

        Args:
            X: Embeddings, one row per item.
            y: Ignored; scikit-learn requires it.
            positives: What belongs together: pairs of row numbers, of shape (m, 2); or embeddings
                of the same shape as `X`, the partner of each row.
            groups: A label per row: rows of one group belong together.
            other: Embeddings from another space, as the texts of images: one space of codes serves
                both, see `transform(y, other=True)`. Row i belongs to row i of `X`, unless
                `positives` are pairs of (row of `X`, row of `other`).
        """
        self._check_options()
        for name in ("heads_", "names_", "_kept"):
            if hasattr(self, name):
                delattr(self, name)
        return self._learn(X, positives, groups, other, self.steps)

    def partial_fit(
        self,
        X: Any,  # noqa: N803
        y: Any = None,
        *,
        positives: Any = None,
        groups: Any = None,
        other: Any = None,
    ) -> "SparseCoder":
        """Continue to learn, in one pass over these rows; see `fit`."""
        self._check_options()
        return self._learn(X, positives, groups, other, None)

    def transform(
        self,
        X: Any,  # noqa: N803
        *,
        k: int | None = None,
        query: bool = False,
        other: bool = False,
    ) -> csr_array:
        """Codes of embeddings: unit rows with at most `k` active entries.

        Args:
            X: Embeddings of the width given to `fit`.
            k: Active entries; None takes the estimator's `k`, for queries its `k_query`.
            query: Codes to search with: more entries, and weighed by rarity if `idf`.
            other: `X` is of the space given to `fit` as `other`.
        """
        parts = list(self.stream(X, k=k, query=query, other=other))
        return parts[0] if len(parts) == 1 else csr_array(vstack(parts, format="csr"))

    def topics(self, X: Any, most: int = 3) -> list[list[Topic]]:  # noqa: N803
        """The dimensions of each row, the strongest first: several topics per document.

        A topic's share of a row is its squared entry; those of all entries sum to one.

        Args:
            X: Embeddings.
            most: Topics per row; fewer where fewer entries are active.
        """
        names = self.get_feature_names_out().tolist()
        codes = self.transform(X)
        rows = zip(codes.indptr[:-1], codes.indptr[1:], strict=True)
        result = []
        for start, end in rows:
            order = start + np.argsort(-codes.data[start:end], kind="stable")[:most]
            strongest = zip(codes.indices[order].tolist(), codes.data[order].tolist(), strict=True)
            result.append([Topic(dim, names[dim], value**2) for dim, value in strongest])
        return result

    def stream(
        self,
        X: Any,  # noqa: N803
        *,
        k: int | None = None,
        query: bool = False,
        other: bool = False,
    ) -> Iterator[csr_array]:
        """As `transform`, a block of rows at a time: for more rows than fit in memory."""
        check_is_fitted(self, "heads_")
        if other and len(self.heads_) == 1:
            raise ValueError("this coder has one side only; fit(x, other=y) gives it another")
        if k is None:
            k = (self.k_query or 4 * self.k) if query else self.k
        k = min(_whole("k", k, 1), self.dims)
        shards = self._shards(X, 1 if other else 0)
        served = self._served(other)
        search = self._search() if query else None
        bar = tqdm(total=len(shards), unit="row", disable=not self.verbose, desc="transform")
        with bar:
            for block in shards.blocks():
                yield vstack([_codes(rows, served, k, search) for rows in _pieces(block)], "csr")
                bar.update(len(block))

    def inverse_transform(self, X: Any) -> np.ndarray:  # noqa: N803
        """Embeddings rebuilt from codes, linearly; `reconstruction_error_` says how well."""
        check_is_fitted(self, "heads_")
        codes = csr_array(X) if issparse(X) else csr_array(np.atleast_2d(X))
        if codes.shape[1] != self.dims:
            raise ValueError(f"codes must have {self.dims} dimensions; got {codes.shape[1]}")
        return self._decoder(codes)

    def name(self, texts: Sequence[str], X: Any = None) -> list[str]:  # noqa: N803
        """Name the dimensions by the words of the texts that fire them most.

        Args:
            texts: One text per row given to `fit`, or per row of `X`.
            X: Embeddings of the texts, if they are not those given to `fit`.
        """
        check_is_fitted(self, "heads_")
        if X is not None:
            codes, rows = self.transform(X), None
        elif hasattr(self, "_seen"):
            codes, rows = self._seen
        else:
            raise ValueError(
                "codes of the rows given to fit are not kept in files or by partial_fit; pass the "
                "embeddings of the texts: name(texts, x)"
            )
        expected = codes.shape[0] if rows is None else self.n_rows_
        if isinstance(texts, str) or len(texts) != expected:
            raise ValueError(f"expected one text per row, {expected}; got {len(texts)}")
        items = list(texts) if rows is None else [texts[row] for row in rows.tolist()]
        self.names_ = name_dimensions(Features(codes, items=items))
        return self.names_

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the dimensions: numbered, or what `name` found, each once."""
        numbered = super().get_feature_names_out(input_features)
        named = getattr(self, "names_", None) or [""] * self.dims
        often = {name for name in named if named.count(name) > 1}
        result = [
            number if name in ("", MIXED) else f"{name} ({dim})" if name in often else name
            for dim, (name, number) in enumerate(zip(named, numbered, strict=True))
        ]
        return np.array(result, dtype=object)

    def features(
        self,
        X: Any,  # noqa: N803
        items: Sequence[str] | None = None,
        labels: Any = None,
        *,
        split: str = "train",
    ) -> Features:
        """Codes with texts and labels of the items, as the atlas and the evals take them."""
        about: dict[str, Any] = {
            "kind": "coder", "split": split, "output": "head", "normalised": True,
            "activation": "relu",
        }  # fmt: skip
        numbers = None
        if labels is not None:
            classes, inverse = np.unique(np.asarray(labels), return_inverse=True)
            about["classes"], numbers = classes.tolist(), torch.from_numpy(inverse)
        if hasattr(self, "names_"):
            about["names"] = self.names_
        return Features(self.transform(X), numbers, items=items, about=about)

    def atlas(
        self,
        X: Any,  # noqa: N803
        items: Sequence[str] | None = None,
        labels: Any = None,
        *,
        out: str | Path = "atlas",
    ) -> Path:
        """Write `<out>/atlas.html`, a page on what every dimension means, from these items."""
        folder = Path(out)
        self.features(X, items, labels).save(folder / "features" / "train_head.safetensors")
        return write_atlas(folder)

    def findings(self, X: Any, target: Any, *, most_p: float = 0.05) -> list[Finding]:  # noqa: N803
        """Dimensions associated with a label or a number; see `ncl_multi.metrics.findings`."""
        names = list(self.get_feature_names_out())
        return findings(self.transform(X), target, names, most_p=most_p)

    def save(self, folder: str | Path) -> Path:
        """Write the coder to a folder, atomically; nothing in it is executed at `load`."""
        check_is_fitted(self, "heads_")
        tensors = {f"heads.{name}": tensor for name, tensor in self.heads_.state_dict().items()}
        tensors |= {f"decoder.{name}": tensor for name, tensor in self._decoder.state().items()}
        tensors["idf"] = torch.from_numpy(self.idf_)
        if self._atoms is not None:
            tensors["atoms"] = torch.from_numpy(self._atoms)
        params = {name: _plain(value) for name, value in self.get_params().items()}
        if not isinstance(params["random_state"], int | None):
            params["random_state"] = None
        options = {
            "params": params,
            "widths": [head.in_dim for head in self.heads_],
            "names": getattr(self, "names_", None),
            "feature_names": _strings(getattr(self, "feature_names_in_", None)),
            "rows": self.n_rows_,
            "error": self.reconstruction_error_,
        }
        with atomic_folder(folder) as unfinished:
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, unfinished / "coder.safetensors", {"format": FILE_FORMAT})
            write_config(unfinished, "coder", options, {"rows": self.n_rows_})
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "SparseCoder":
        """A coder that `save` wrote; `ncl.load` does the same."""
        return load_as(folder, cls)

    @classmethod
    def _build(cls, options: dict[str, Any], folder: Path) -> "SparseCoder":
        params = options["params"]
        names = cls._get_param_names()
        if sorted(params) != sorted(names):
            raise ValueError(f"its params must be {', '.join(names)}; got {', '.join(params)}")
        coder = cls(**params)
        coder._check_options()
        check_fits(lambda: coder._made_heads(options["widths"]), folder / "coder.safetensors")
        coder.heads_ = coder._made_heads(options["widths"])
        coder.n_features_in_ = options["widths"][0]
        coder.reconstruction_error_ = float(options["error"])
        coder.n_rows_ = int(options["rows"])
        if options["feature_names"] is not None:
            coder.feature_names_in_ = np.array(options["feature_names"], dtype=object)
        if options["names"] is not None:
            coder.names_ = [str(name) for name in options["names"]]
        return coder

    def _load_parts(self, folder: Path) -> None:
        number = ("F32",)
        expected = {
            "heads.*": Expected(number, (0, 1, 2)), "decoder.*": Expected(number, (1, 2)),
            "idf": Expected(number),
        }  # fmt: skip
        if len(self.heads_) == 1:
            expected["atoms"] = Expected(number, 2)
        parts, _ = read_safetensors(
            folder / "coder.safetensors", expected, framework="pt", file_format=FILE_FORMAT
        )
        for kind in ("heads", "decoder"):
            prefix = f"{kind}."
            state = {n.removeprefix(prefix): p for n, p in parts.items() if n.startswith(prefix)}
            if kind == "heads":
                self.heads_.load_state_dict(state)
            else:
                self._decoder = LinearDecoder.of_state(state, self.dims, self.n_features_in_)
        self.heads_.eval()
        if len(parts["idf"]) != self.dims:
            raise ValueError(f"idf must have {self.dims} numbers; got {len(parts['idf'])}")
        self.idf_ = parts["idf"].numpy()
        self._atoms = parts["atoms"].numpy() if "atoms" in parts else None
        if self._atoms is not None and self._atoms.shape != (self.dims, self.n_features_in_):
            raise ValueError(
                f"atoms must have the shape {(self.dims, self.n_features_in_)}; got "
                f"{self._atoms.shape}"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Codes of the training rows are only used by `name`, and may be larger than the rest.
        return {name: v for name, v in super().__getstate__().items() if name != "_seen"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.dims

    def _check_options(self) -> None:
        least = {
            "dims": 1, "k": 1, "steps": 1, "batch_size": 2, "neighbours": 1, "max_rows": 2,
        }  # fmt: skip
        for name, smallest in least.items():
            _whole(name, getattr(self, name), smallest)
        if self.k_query is not None:
            _whole("k_query", self.k_query, 1)
        for name in ("learning_rate", "temperature"):
            if not _number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")
        for name in ("imitation", "noise"):
            value = getattr(self, name)
            if not (name == "imitation" and value is None) and _number(name, value) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        if self.k > self.dims:
            raise ValueError(f"k must be at most dims, {self.dims}; got {self.k}")
        if self.ks is not None:
            if not np.iterable(self.ks) or not len(self.ks):
                raise ValueError(f"ks must be None or whole numbers, as (8, 32); got {self.ks!r}")
            for k in self.ks:
                _whole("each of ks", k, 1)

    @property
    def _started(self) -> bool:
        return hasattr(self, "heads_")

    def _shards(self, source: Any, side: int = 0) -> Shards:
        """The rows of a side; rows in memory are also checked by scikit-learn."""
        if side == 0 and _in_memory(source):
            source = validate_data(
                self, source, reset=not self._started, accept_sparse="csr", dtype="numeric",
                ensure_all_finite=False,
            )  # fmt: skip
        shards = source if isinstance(source, Shards) else Shards(source)
        if not self._started:
            if side == 0:
                self.n_features_in_ = shards.shape[1]
        elif shards.shape[1] != self.heads_[side].in_dim:
            raise ValueError(
                f"X has {shards.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.heads_[side].in_dim} features as input"
            )
        return shards

    def _served(self, other: bool = False) -> nn.Module:
        """The linear map of a side, before the ReLU."""
        return self.heads_[-1 if other else 0].fold()[0]

    def _search(self) -> "_Search":
        """How queries differ from documents."""
        return _Search(
            None if self._atoms is None else torch.from_numpy(self._atoms),
            torch.from_numpy(self.idf_) if self.idf else None,
        )

    def _made_heads(self, widths: Sequence[int]) -> Any:
        return nn.ModuleList(
            [NonNegHead(width, int(self.dims), batch_norm=False) for width in widths]
        )

    def _learn(
        self, source: Any, positives: Any, groups: Any, other: Any, steps: int | None
    ) -> "SparseCoder":
        """Train for `steps`, or one pass if None, and measure the codes."""
        sides = [self._shards(source)] + ([] if other is None else [self._shards(other, 1)])
        if self._started and len(self.heads_) != len(sides):
            raise ValueError(f"this coder has {len(self.heads_)} sides; got {len(sides)}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            data = read_examples(
                sides, positives, groups, neighbours=self.neighbours, max_rows=self.max_rows
            )
            if not self._started:
                self.heads_ = self._made_heads([side.shape[1] for side in sides])
                start_heads(self.heads_, data)
            self._train(data, seed, steps)
        self.n_rows_ = len(sides[0]) + (getattr(self, "n_rows_", 0) if steps is None else 0)
        self._measure(data, seed, keep=steps is None)
        return self

    def _train(self, data: Examples, seed: int, steps: int | None) -> None:
        from ncl_multi.training.fit import fit

        objective = EmbeddingObjective(
            self.heads_, data, self._entries(),
            temperature=self.temperature, noise=self.noise,
            imitation=_IMITATION[len(self.heads_)] if self.imitation is None else self.imitation,
        )  # fmt: skip
        size = min(self.batch_size, len(data.rows))
        loader = DataLoader(Rows(data.rows), size, collate_fn=Rows.together, drop_last=True)
        fit(
            objective,
            loader,
            TrainConfig(
                steps=steps or len(loader), batch_size=size, lr=self.learning_rate, seed=seed,
                schedule="constant" if steps is None else "cosine", ema=0.98, device="cpu",
                progress=self.verbose,
            ),
        )  # fmt: skip

    def _entries(self) -> list[int]:
        """The numbers of entries to train for."""
        powers = [2**power for power in range(2, 12) if 2**power <= 2 * self.k]
        ks = {*powers, self.k} if self.ks is None else self.ks
        return sorted({int(min(k, self.dims)) for k in ks})

    def _measure(self, data: Examples, seed: int, *, keep: bool) -> None:
        """Fit `idf_`, the decoder and the atoms of queries on training rows."""
        x = data.sides[0].numpy()
        if keep:
            x = self._kept = _reservoir(getattr(self, "_kept", x[:0]), x, self.n_rows_, seed)
        served = self._served()
        codes = csr_array(vstack([_codes(rows, served, int(self.k)) for rows in _pieces(x)]))
        if not keep:
            self._seen = (codes, data.numbers)
        active = np.bincount(codes.indices, minlength=self.dims)
        self.idf_ = (np.log((1 + len(x)) / (1 + active)) + 1).astype(np.float32)
        chosen = np.random.default_rng(seed).permutation(len(x))[:_DECODED]
        self._decoder, self.reconstruction_error_ = LinearDecoder.fit(codes[chosen], x[chosen])
        self._atoms = None
        if len(self.heads_) == 1:
            self._atoms = _fit_atoms(x[chosen], served, self._entries())


def _in_memory(source: Any) -> bool:
    """Whether scikit-learn may validate the whole array."""
    if isinstance(source, np.memmap | Tensor | str | Path):
        return False
    if isinstance(source, list | tuple):
        return not any(isinstance(entry, str | Path | Tensor) for entry in source)
    if is_column(source):
        return False
    return issparse(source) or hasattr(source, "__array__") or hasattr(source, "iloc")


def _pieces(block: np.ndarray) -> Iterator[np.ndarray]:
    yield from (block[start : start + 2048] for start in range(0, max(1, len(block)), 2048))


class _Search(NamedTuple):
    """How codes of queries differ from those of documents.

    `atoms`: what each dimension adds to a unit embedding when codes are decoded. A query's products
    with them are the code whose score is the cosine of the query and the decoded document, so they
    see details that the head leaves out; the head sees what documents have in common. A query is
    the weighted sum of both. `weights` are those of the dimensions.
    """

    atoms: Tensor | None
    weights: Tensor | None

    def __call__(self, h: Tensor, z: Tensor) -> Tensor:
        if self.atoms is not None:
            details = F.relu(h @ self.atoms.T)
            z = F.normalize(z, dim=1) + _DETAILS * F.normalize(details, dim=1)
        return z if self.weights is None else z * self.weights


@torch.inference_mode()
def _codes(x: np.ndarray, served: nn.Module, k: int, search: _Search | None = None) -> csr_array:
    """Unit codes of a few rows: the k largest entries of the folded head's output."""
    # A copy: torch warns of the read-only rows of a memmap.
    h = unit_embeddings(torch.from_numpy(np.array(x, order="C")))
    z = F.relu(served(h))
    if search is not None:
        z = search(h, z)
    values, dims = z.topk(k, dim=1)
    dims, order = dims.sort(dim=1)
    values = F.normalize(values.gather(1, order), dim=1) * h.any(dim=1, keepdim=True)
    active = values > 0
    # Both with 32 bits: parts of scikit-learn refuse wider ones.
    indptr = np.concatenate([[0], active.sum(dim=1).cumsum(0).numpy()]).astype(np.int32)
    entries = (values[active].numpy(), dims[active].numpy().astype(np.int32), indptr)
    return csr_array(entries, shape=(len(x), z.shape[1]))


def _fit_atoms(x: np.ndarray, served: nn.Module, ks: Sequence[int]) -> np.ndarray:
    """What each dimension of unit codes adds to a unit embedding, whatever the number of entries.

    Codes of all these numbers of entries are fitted together, so that one matrix serves queries to
    short and to long documents.
    """
    x = x[: _DECODED // len(ks)]
    unit = unit_embeddings(torch.from_numpy(x)).double().numpy()
    codes = vstack([_codes(rows, served, k) for k in ks for rows in _pieces(x)], "csr")
    around = unit - unit.mean(axis=0)
    return ridge(codes, np.concatenate([around] * len(ks))).astype(np.float32)


def _reservoir(sample: np.ndarray, new: np.ndarray, seen: int, seed: int) -> np.ndarray:
    """A sample of at most 4,096 of all rows seen, each with about the same probability."""
    generator = np.random.default_rng(seed)
    share = len(new) / seen
    if len(sample) + len(new) > _KEPT:
        count = min(len(new), max(_KEPT - len(sample), round(_KEPT * share)))
        new = new[generator.permutation(len(new))[:count]]
        sample = sample[generator.permutation(len(sample))[: _KEPT - count]]
    return np.concatenate([sample, new])


def _whole(name: str, number: Any, least: int) -> int:
    """Return the number if it is whole and at least `least`."""
    if not isinstance(number, Integral) or isinstance(number, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {number!r}")
    return int(number)


def _number(name: str, number: Any) -> float:
    """Return the number if it is finite."""
    if not isinstance(number, Real) or not np.isfinite(float(number)):
        raise ValueError(f"{name} must be a finite number; got {number!r}")
    return float(number)


def _plain(value: Any) -> Any:
    """A parameter as a JSON value: converts NumPy numbers and arrays."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, list | tuple | range) else value


def _strings(names: Any) -> list[str] | None:
    return None if names is None else [str(name) for name in names]
