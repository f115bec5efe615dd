"""The report of a sentence run: readable dimensions, and quality at k active entries."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from scipy.sparse import csr_array, lil_array, vstack
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ncl_multi import data
from ncl_multi.adapters.sentence.corpus import Corpus, Examples, cached_features
from ncl_multi.adapters.sentence.data import held_out
from ncl_multi.adapters.sentence.export import export_onnx, export_sentence_transformers
from ncl_multi.adapters.sentence.model import NonNegEncoder
from ncl_multi.adapters.sentence.objective import SparseAutoencoder
from ncl_multi.codes.features import Features, to_csr
from ncl_multi.data.words import CATEGORIES
from ncl_multi.files import link_equal_files
from ncl_multi.head import top_k
from ncl_multi.metrics import alive, ndcg_at_k, readable, spearman
from ncl_multi.report import table, write_json
from ncl_multi.training.batches import Rows

log = logging.getLogger(__name__)

ACTIVE = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of active entries that are compared."""
PAIRS = ("stsb_dev", "stsb_test", "sick_trial")
COLLECTIONS = ("cisi", "lisa", "cranfield")

Coder = Callable[[Tensor], Tensor]
Figures = dict[str, dict[str, float]]


class Method(NamedTuple):
    """Codes of features, and the signed weights of dimensions for a query, if there are any."""

    code: Coder
    weights: Coder | None = None


# Methods that keep the first k dimensions, the same for all texts.
_ORDERED = ("truncated", "pca")
_SEARCHED = 20_000
_SHOWN = 10_000


@dataclass(frozen=True)
class TextBenchmarks:
    """The encoder's features of all benchmark texts.

    `pairs` are the two sides of pairs of sentences and their scores; `searched` are queries,
    documents and their relevance.
    """

    pairs: dict[str, tuple[Tensor, Tensor, Tensor]]
    searched: dict[str, tuple[Tensor, Tensor, csr_array]]

    @classmethod
    def of(
        cls,
        embed: Callable[[Sequence[str]], Tensor],
        pairs: Sequence[str] = PAIRS,
        collections: Sequence[str] = COLLECTIONS,
    ) -> "TextBenchmarks":
        """STS-B, and SICK, CISI, LISA and Cranfield if NCL_DATA contains them."""
        compared: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        searched: dict[str, tuple[Tensor, Tensor, csr_array]] = {}
        for name in pairs:
            benchmark, _, split = name.partition("_")
            try:
                first, second, scores = getattr(data, benchmark)(split)
            except FileNotFoundError as error:
                log.warning(f"not measured: {error}")
                continue
            compared[name] = embed(first), embed(second), torch.tensor(scores)
        for name in collections:
            try:
                collection = data.collection(name)
            except FileNotFoundError as error:
                log.warning(f"not measured: {error}")
                continue
            relevant = lil_array((len(collection.queries), len(collection.documents)))
            for query, rows in enumerate(collection.relevant):
                relevant[query, rows] = 1
            searched[name] = (
                embed(collection.queries),
                embed(collection.documents),
                csr_array(relevant),
            )
        return cls(compared, searched)

    @torch.no_grad()
    def row(self, method: Method, k: int | None, *, ordered: bool = False) -> Figures:
        """Quality with k active entries, or the first k dimensions if they are `ordered`, by split.

        Spearman for pairs, nDCG@10 for what is searched: with k entries on both sides, with whole
        queries (`_whole_query`) and with signed ones (`_signed_query`), which need no storage
        either. None measures whole codes.
        """
        code, weights = method
        figures: Figures = {}
        for name, (first, second, scores) in self.pairs.items():
            za, zb = (_cut(code(h), k, ordered) for h in (first, second))
            benchmark, _, split = name.partition("_")
            # SICK's trial split is what others report on before its test split.
            row = figures.setdefault("test" if split == "trial" else split, {})
            row[f"{benchmark}_spearman"] = spearman(F.cosine_similarity(za, zb), scores)
        for name, (queries, documents, relevant) in self.searched.items():
            query_codes, stored = code(queries), _cut(code(documents), k, ordered)
            row = figures.setdefault("test", {})
            row[f"{name}_ndcg_at_10"] = ndcg_at_k(_cut(query_codes, k, ordered), stored, relevant)
            if k is not None and not ordered:
                whole = ndcg_at_k(_cut(query_codes, None, False), stored, relevant)
                row[f"{name}_ndcg_at_10_whole_query"] = whole
                if weights is not None:
                    signed = ndcg_at_k(weights(queries), stored, relevant)
                    row[f"{name}_ndcg_at_10_signed_query"] = signed
        return figures


def write_report(
    models: Mapping[str, NonNegEncoder],
    corpus: Corpus,
    others: Mapping[str, Method],
    out: Path,
    *,
    benchmarks: bool = False,
    onnx: bool = False,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Write features, exports and figures of a run.

    The features are those of the texts that were given; what belongs to a model other than `ncl`
    is written to a folder of its name. Benchmarks are measured only if `benchmarks` is true, or
    to compare with `others`.
    """
    ncl_model = models["ncl"]
    figures: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        folder = out if name == "ncl" else out / name
        # A page of more items is not read.
        texts = corpus.sentences[:_SHOWN]
        h = cached_features(model, corpus.sentences, precision)[:_SHOWN]
        features = _features(model, texts, h, data=corpus.name, split="train")
        features.save(folder / "features" / "train_head.safetensors")
        figures[name] = {"train": {"alive": alive(features.z)}}
        if corpus.name in ("broad", "wordnet"):
            figures[name]["test"] = _readable(model, corpus.name, folder, precision)
    export_sentence_transformers(ncl_model, out / "sentence_transformers")
    if onnx:
        export_onnx(ncl_model, out / "model.onnx")
    table(
        "readable",
        {f"{m} {s}": row for m, by_split in figures.items() for s, row in by_split.items()},
    )
    if benchmarks or others:
        judged = TextBenchmarks.of(partial(cached_features, ncl_model, precision=precision))
        measured = quality(judged, {"ncl": whole_codes(ncl_model), **others})
        table("quality at k active entries", {m: row["test"] for m, row in measured.items()})
        log.info("the same as a plot: %s", plot(measured, out / "quality.png"))
        figures |= measured
    write_json(out / "metrics.json", figures)
    for name, model in models.items():
        model.figures = {
            f"{split} {measure}": round(value, 4)
            for split, row in figures[name].items()
            for measure, value in row.items()
        }
        model.save_pretrained((out if name == "ncl" else out / name) / "model")
    link_equal_files(out)
    return figures


def whole_codes(model: NonNegEncoder) -> Method:
    """The head without the cut to its k, and without its activation."""
    folded = model.head.fold().cpu()
    whole = folded if model.head.k is None else folded[:-1]
    return Method(whole, whole[:-1])


def quality(
    judged: TextBenchmarks, methods: Mapping[str, Method], active: Sequence[int] = ACTIVE
) -> dict[str, Figures]:
    """Figures of `<method>@<k>` by split, of the whole encoder (`dense`) and its first k features.

    A method whose name ends in `@<k>` was trained for this k and is measured only there.
    """
    figures = {"dense": judged.row(Method(_same), None)}
    for name, coder in {"truncated": Method(_same), **methods}.items():
        code = coder.code
        method, _, trained_for = name.partition("@")
        ordered = method in _ORDERED
        for k in (int(trained_for),) if trained_for else active:
            if k > _width(judged, code):
                continue
            row = judged.row(coder, k, ordered=ordered)
            # A float32 value and, for sparse codes, the index of its dimension.
            row["test"]["bytes"] = k * (4.0 if ordered else 6.0)
            if (took := _search_ms(judged, code, k, ordered)) is not None:
                row["test"]["search_ms"] = took
            figures[f"{method}@{k}"] = row
    return figures


def baselines(
    model: NonNegEncoder, corpus: Corpus, config: Any, csr_lr: float
) -> dict[str, Method]:
    """CSR at each k and PCA on the same texts; CSR with the same examples and number of steps."""
    from ncl_multi.training import fit as loop

    h = cached_features(model, corpus.sentences, config.precision)
    mean, axes = principal_axes(h, max(ACTIVE))
    methods = {"pca": Method(lambda h: (h - mean) @ axes)}
    size = min(config.batch_size, len(corpus.examples))
    loader = DataLoader(Rows(corpus.examples), size, collate_fn=Rows.together, drop_last=True)
    examples = Examples(h, config)

    def step(csr: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        columns = examples.columns(batch.cpu())
        return csr([h[column].to(batch.device) for column in columns])

    for k in config.k or (64,):
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            csr = SparseAutoencoder(h.shape[1], model.dims, k)
        trained = replace(config, out=config.out / f"csr/{k}", lr=csr_lr, ema=None)
        loop.fit(loop.StepObjective(csr, step), loader, trained, fingerprint=corpus.fingerprint())
        methods[f"csr@{k}"] = Method(csr.cpu().codes, csr.weights)
    return methods


def principal_axes(h: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Mean and leading principal axes of features, (width,) and (width, dims)."""
    mean = h.mean(dim=0)
    axes = torch.linalg.eigh((h - mean).T @ (h - mean)).eigenvectors.flip(1)
    return mean, axes[:, :dims]


def plot(figures: Mapping[str, Figures], path: Path) -> Path:
    """Draw every measure of quality against active entries, one line per method."""
    from matplotlib.figure import Figure

    candidates = ("stsb_spearman", "sick_spearman", *(f"{name}_ndcg_at_10" for name in COLLECTIONS))
    dense = figures["dense"]["test"]
    measures = [measure for measure in candidates if measure in dense]
    figure = Figure(figsize=(5 * max(1, len(measures)), 4), layout="constrained")
    for place, measure in enumerate(measures, 1):
        axes = figure.add_subplot(1, len(measures), place)
        axes.axhline(dense[measure], color="grey", linestyle=":", label="dense, whole")
        lines: dict[str, list[tuple[int, float]]] = {}
        for name, row in figures.items():
            method, _, k = name.partition("@")
            if k and measure in row["test"]:
                lines.setdefault(method, []).append((int(k), row["test"][measure]))
        for method, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=method)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="active entries", ylabel=measure)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _readable(model: NonNegEncoder, name: str, folder: Path, precision: str) -> dict[str, float]:
    """Readability on entries of WordNet that the model has not seen, judged by another encoder."""
    from sentence_transformers import SentenceTransformer

    texts, categories = held_out()
    h, y = cached_features(model, texts, precision), torch.tensor(categories)
    features = replace(_features(model, texts, h, data=name, split="test"), y=y)
    features.about.update(classes=CATEGORIES)
    features.save(folder / "features" / "test_head.safetensors")
    judge = SentenceTransformer(str(data.wordllama()), device="cpu").encode(texts)
    figures, _ = readable(features.z, y, embeddings=torch.as_tensor(judge))
    return figures | {"alive": alive(features.z)}


@torch.no_grad()
def _features(model: NonNegEncoder, texts: list[str], h: Tensor, data: str, split: str) -> Features:
    """As `model.features`, from the encoder's features instead of texts."""
    codes = to_csr(model.head.fold().cpu()(h))
    features = replace(model.features(texts[:1], split=split), z=codes, items=texts)
    features.about.update(data=data)
    return features


def _same(h: Tensor) -> Tensor:
    return h


def _width(judged: TextBenchmarks, code: Coder) -> int:
    first, *_ = next(iter((judged.pairs | judged.searched).values()))
    return code(first[:2]).shape[1]


def _cut(z: Float[Tensor, "n d"], k: int | None, ordered: bool) -> Float[Tensor, "n kept"]:
    if k is None:
        return F.normalize(z, dim=1)
    return F.normalize(z[:, :k] if ordered else top_k(z, k), dim=1)


@torch.no_grad()
def _search_ms(judged: TextBenchmarks, code: Coder, k: int, ordered: bool) -> float | None:
    """Milliseconds for the ten nearest of 20,000 rows; None for sparse codes without `search`."""
    first, *_ = next(iter((judged.pairs | judged.searched).values()))
    z = _cut(code(first), k, ordered)
    repeats = -(-_SEARCHED // len(z))
    if ordered:
        items, queries = z.repeat(repeats, 1)[:_SEARCHED], z[:100]
        started = time.perf_counter()
        (queries @ items.T).topk(10)
        return (time.perf_counter() - started) * 1000 / len(queries)
    if find_spec("numba") is None:
        return None
    from ncl_multi.codes.search import SparseIndex

    codes = to_csr(z)
    index = SparseIndex(z.shape[1])
    index.add(range(_SEARCHED), csr_array(vstack([codes] * repeats, format="csr")[:_SEARCHED]))
    index.search(codes[:100], k=10)
    started = time.perf_counter()
    index.search(codes[:100], k=10)
    return (time.perf_counter() - started) * 1000 / 100
