"""Sparse sentence codes compared with other short embeddings, at equal active dimensions.

A run keeps the codes of every method under `<run>/compare/<method>/`: the two sides of
STS-B as `stsb-<split>-{first,second}`, Cranfield as `cranfield-{queries,documents}`.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from scipy.sparse import csr_array, vstack
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ncl_multi import data
from ncl_multi.adapters.sentence.corpus import Corpus, cached_features
from ncl_multi.adapters.sentence.export import export_onnx, export_sentence_transformers
from ncl_multi.adapters.sentence.model import NonNegEncoder
from ncl_multi.adapters.sentence.objective import SparseAutoencoder
from ncl_multi.codes.features import Features, to_csr
from ncl_multi.files import link_equal_files
from ncl_multi.head import top_k
from ncl_multi.metrics import ndcg_at_k, readability, spearman
from ncl_multi.report import table, write_json
from ncl_multi.training.batches import Rows

ACTIVE = (4, 8, 16, 32, 64, 128, 256)
"""Numbers of active dimensions that are compared."""

# Methods whose dimensions are ordered once for all sentences, so that the first k are kept.
_ORDERED = ("truncated", "pca")
_SEARCHED = 20_000
_SHOWN = 10_000


@dataclass(frozen=True)
class TextBenchmarks:
    """The encoder's features of everything that is judged, by the name of their file."""

    features: dict[str, Features]

    @classmethod
    def of(cls, embed: Callable[[Sequence[str]], Tensor]) -> "TextBenchmarks":
        """STS-B, and Cranfield if NCL_DATA holds it."""
        found: dict[str, Features] = {}
        for split in ("dev", "test"):
            first, second, scores = data.stsb(split)
            for side, sentences in (("first", first), ("second", second)):
                found[f"stsb-{split}-{side}"] = Features(
                    embed(sentences), y=torch.tensor(scores), items=sentences
                )
        try:
            cranfield = data.cranfield()
        except FileNotFoundError:
            return cls(found)
        relevant = torch.zeros(len(cranfield.queries), len(cranfield.documents), dtype=torch.uint8)
        for query, right in enumerate(cranfield.relevant):
            relevant[query, right] = 1
        queries = Features(embed(cranfield.queries), y=relevant, items=cranfield.queries)
        documents = Features(embed(cranfield.documents))
        return cls(found | {"cranfield-queries": queries, "cranfield-documents": documents})

    @torch.no_grad()
    def write(self, folder: Path, methods: dict[str, Callable[[Tensor], Tensor]]) -> None:
        """Write the codes that each method gives, the largest 256 of a row where it is wider."""
        for method, code in methods.items():
            for name, own in self.features.items():
                z = code(own.z)
                z = z if method in (*_ORDERED, "dense") else top_k(z, min(max(ACTIVE), z.shape[1]))
                about = own.about | {"method": method}
                Features(z, own.y, about=about).save(folder / method / f"{name}.safetensors")


def write_report(
    models: Mapping[str, NonNegEncoder],
    corpus: Corpus,
    others: Mapping[str, Callable[[Tensor], Tensor]],
    out: Path,
    *,
    onnx: bool = False,
    benchmarks: bool = True,
) -> dict[str, Any]:
    """Write the codes of the corpus, the exports, and the table of quality at k active dimensions.

    Without `benchmarks` the table says how sparse and how readable the codes of the corpus are.
    What belongs to a model other than `ncl` is written to a folder of its name.
    """
    ours = models["ncl"]
    sparse: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        folder = out if name == "ncl" else out / name
        # The frozen encoder's features are in the cache; a page of more items is not read.
        shown = corpus.sentences[:_SHOWN]
        features = model.features(shown, split="train")
        features.about.update(data=corpus.name)
        features.save(folder / "features" / "train_head.safetensors")
        sparse[name] = readability(features.z)
        if not benchmarks:
            model.figures = {m: round(value, 4) for m, value in sparse[name].items()}
        model.save_pretrained(folder / "model")
    export_sentence_transformers(ours, out / "sentence_transformers")
    if onnx:
        export_onnx(ours, out / "model.onnx")
    link_equal_files(out)
    if not benchmarks:
        write_json(out / "metrics.json", {name: {"train": row} for name, row in sparse.items()})
        table(f"{corpus.name}, {len(corpus.sentences)} sentences", sparse)
        return {name: {"train": row} for name, row in sparse.items()}
    encoded = TextBenchmarks.of(partial(cached_features, ours))
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "dense": lambda h: h, "truncated": lambda h: h,
    }  # fmt: skip
    whole = ours.head.fold().cpu()
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        **plain,
        **others,
        "ncl": whole if ours.head.k is None else whole[:-1],
    }
    encoded.write(out / "compare", methods)
    rows = compare(out)
    figures: dict[str, Any] = {}
    for row in rows:
        method, active = row["method"], row["active"]
        judged = {m: v for m, v in row.items() if isinstance(v, float)}
        dev = {"stsb_spearman": judged.pop("STS-B dev")}
        test = {"stsb_spearman": judged.pop("STS-B test")}
        test |= {_snake(m): v for m, v in judged.items()}
        name = method if method == "dense" else f"{method}@{active}"
        figures[name] = {"dev": dev, "test": test}
    write_json(out / "metrics.json", figures)
    table("quality at k active dimensions", {f"{r['method']} {r['active']}": r for r in rows})
    print(f"the same as a plot: {plot(rows, out / 'quality.png')}")
    return figures


def baselines(
    model: NonNegEncoder, corpus: Corpus, config: Any
) -> dict[str, Callable[[Tensor], Tensor]]:
    """CSR trained on the same data at each k, and PCA: the methods to compare with."""
    from ncl_multi.training import fit as loop

    h = cached_features(model, corpus.sentences)
    mean, axes = principal_axes(h, 256)
    methods: dict[str, Callable[[Tensor], Tensor]] = {"pca": lambda h: (h - mean) @ axes}
    if corpus.examples.shape[1] < 2:
        return methods
    loader = DataLoader(
        Rows(corpus.examples), config.batch_size, collate_fn=Rows.together, drop_last=True
    )

    def step(csr: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        # Sentences that no one has paired are their own positives, and their partners negatives.
        first, second, _ = corpus.draw_pairs(len(batch))
        columns = zip(batch.cpu().unbind(dim=1), (first, first, second), strict=False)
        return csr([h[torch.cat(column)].to(batch.device) for column in columns])

    for k in config.k or (64,):
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            csr = SparseAutoencoder(h.shape[1], model.dims, k)
        steps = min(config.csr_steps, config.steps or config.epochs * len(loader))
        own = replace(config, out=config.out / f"csr/{k}", steps=steps, lr=config.csr_lr, ema=None)
        loop.fit(loop.StepObjective(csr, step), loader, own, fingerprint=corpus.fingerprint())
        methods[f"csr@{k}"] = csr.cpu().codes
    return methods


def _snake(measure: str) -> str:
    return measure.lower().replace(" ", "_").replace("-", "_").replace("@", "_at_")


def principal_axes(h: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Mean and leading principal axes of features, (width,) and (width, dims)."""
    mean = h.mean(dim=0)
    axes = torch.linalg.eigh((h - mean).T @ (h - mean)).eigenvectors.flip(1)
    return mean, axes[:, :dims]


def compare(run: Path, active: Iterable[int] = ACTIVE) -> list[dict[str, Any]]:
    """One row for every method and number of active dimensions, and one for the whole encoder.

    A method that was trained once for each number of active dimensions is called `<method>@<k>`.
    """
    methods = sorted(folder for folder in (run / "compare").glob("*") if folder.is_dir())
    if not methods:
        raise FileNotFoundError(f"{run} has no compare folder: run recipes/sentence_ncl.py first")
    rows = []
    for folder in methods:
        files = {path.stem: Features.load(path) for path in sorted(folder.glob("*.safetensors"))}
        if not files:
            raise FileNotFoundError(f"{folder} has no features: run recipes/sentence_ncl.py again")
        method, _, trained_for = folder.name.partition("@")
        ks = (None,) if method == "dense" else (int(trained_for),) if trained_for else tuple(active)
        for k in ks:
            if k is None or k <= next(iter(files.values())).dims:
                rows.append(_row(method, files, k))
    return sorted(rows, key=lambda row: (row["method"], row["active"]))


def plot(rows: list[dict[str, Any]], path: Path) -> Path:
    """Draw STS-B and, if it was judged, Cranfield against active dimensions, one line a method."""
    from matplotlib.figure import Figure

    measures = [m for m in ("STS-B test", "Cranfield nDCG@10") if any(m in row for row in rows)]
    figure = Figure(figsize=(6 * len(measures), 4), layout="constrained")
    for axes, measure in zip(
        figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True
    ):
        for method in dict.fromkeys(row["method"] for row in rows):
            points = [row for row in rows if row["method"] == method and measure in row]
            if method == "dense":
                axes.axhline(points[0][measure], color="grey", linestyle=":", label="dense, whole")
            elif points:
                active = [point["active"] for point in points]
                axes.plot(active, [point[measure] for point in points], "o-", label=method)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="active dimensions", ylabel=measure)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _row(method: str, files: dict[str, Features], k: int | None) -> dict[str, Any]:
    ordered = method in _ORDERED or k is None
    codes = {name: _cut(own.dense().float(), k, ordered) for name, own in files.items()}
    width = next(iter(codes.values())).shape[1]
    row: dict[str, Any] = {"method": method, "active": k or width}
    for split in ("dev", "test"):
        sides = [f"stsb-{split}-{side}" for side in ("first", "second")]
        if sides[0] in codes:
            scores = torch.as_tensor(files[sides[0]].y)
            cosines = F.cosine_similarity(codes[sides[0]], codes[sides[1]])
            row[f"STS-B {split}"] = spearman(cosines, scores)
    if "cranfield-queries" in codes:
        # Its labels are the judgements: a line a query, a column a document.
        relevant = csr_array(torch.as_tensor(files["cranfield-queries"].y).float().numpy())
        row["Cranfield nDCG@10"] = ndcg_at_k(
            codes["cranfield-queries"], codes["cranfield-documents"], relevant
        )
    # A value in single precision, and for sparse codes the number of its dimension in two bytes.
    row["bytes"] = row["active"] * (4 if ordered else 6)
    first = next(iter(codes.values()))
    row["search ms"] = _dense_search(first) if ordered else _sparse_search(first)
    return row


def _cut(z: Tensor, k: int | None, ordered: bool) -> Tensor:
    if k is None:
        return F.normalize(z, dim=1)
    return F.normalize(z[:, :k] if ordered else top_k(z, k), dim=1)


def _dense_search(z: Tensor) -> float:
    """Milliseconds for the ten nearest of 20,000 rows, which are those of `z` repeated."""
    items = z.repeat(-(-_SEARCHED // len(z)), 1)[:_SEARCHED]
    queries = z[:100]
    started = time.perf_counter()
    (queries @ items.T).topk(10)
    return (time.perf_counter() - started) * 1000 / len(queries)


def _sparse_search(z: Tensor) -> float | None:
    """The same by inverted lists; None without the `search` extra."""
    if find_spec("numba") is None:
        return None
    from ncl_multi.codes.search import SparseIndex

    codes = to_csr(z)
    items = csr_array(vstack([codes] * -(-_SEARCHED // len(z)), format="csr")[:_SEARCHED])
    index = SparseIndex(z.shape[1])
    index.add(range(_SEARCHED), items)
    queries = codes[:100]
    index.search(queries, k=10)
    started = time.perf_counter()
    index.search(queries, k=10)
    return (time.perf_counter() - started) * 1000 / queries.shape[0]
