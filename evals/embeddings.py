"""How good and how readable are sparse codes of embeddings? `SparseCoder` and competitors.

Quality is nDCG@10 of search, as a share of that of the whole embeddings, at equal active entries.
Everything is fitted on the documents only.

Usage:
    python evals/embeddings.py cisi --seeds 0 1 2              # or lisa, cranfield: MiniLM's
    python evals/embeddings.py wordnet                         # with categories, for purity
    python evals/embeddings.py docstrings --methods csr --learning-rate 5e-4     # to choose it
    python evals/embeddings.py documents.npy --queries queries.npy --judgements right.tsv
    python evals/embeddings.py x.npy --labels labels.txt --judge other.npy --k 8 32
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ncl_multi.log import show_messages

if TYPE_CHECKING:
    from baselines import Budget
    from torch import Tensor


@dataclass(frozen=True)
class Config:
    """Search, readability, bytes and time of codes at k active entries."""

    documents: tyro.conf.Positional[Path]
    """Embeddings to fit on and to search; or a collection that MiniLM embeds: cisi, lisa,
    cranfield, another name in NCL_DATA/retrieval, wordnet, or docstrings of installed libraries."""
    queries: Path | None = None
    """Embeddings to search with; None holds out a tenth of the documents."""
    judgements: Path | None = None
    """Tab separated lines of query row, document row (from 0), gain; None takes the ten
    nearest by the whole embeddings as relevant."""
    labels: Path | None = None
    """A text file with the class of each document on a line, for purity and intruders."""
    judge: Path | None = None
    """Embeddings of the documents by another model, as a judge of intruders."""
    k: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Numbers of active entries."""
    methods: tuple[str, ...] = ()
    """Only these, `ncl` and competitors; none for all."""
    dims: int = 2048
    """Width of sparse codes."""
    steps: int = 300
    """Training steps of those that are trained."""
    learning_rate: float | None = None
    """Of CSR and the autoencoder; None for what was best on docstrings."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of everything random: tables show the mean and the spread."""
    cache: Path = Path("runs/embeddings")
    """Folder that keeps MiniLM's embeddings."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def embed(cfg: Config) -> Config:
    """The config with files in place of a collection's name: embeddings, judgements or labels."""
    from baselines import embed_texts

    from ncl_multi import data
    from ncl_multi.data.retrieval import collection

    if cfg.documents.exists():
        return cfg
    name = str(cfg.documents)
    paths = {suffix: cfg.cache / f"{name}{suffix}" for suffix in (".npy", "_q.npy", ".tsv", ".txt")}
    cfg.cache.mkdir(parents=True, exist_ok=True)
    if name == "wordnet":
        meanings = data.wordnet()[::23]
        embed_texts(paths[".npy"], [meaning.entry for meaning in meanings])
        labels = "".join(f"{meaning.category}\n" for meaning in meanings)
        paths[".txt"].write_text(labels, encoding="utf-8")
        return replace(cfg, documents=paths[".npy"], labels=paths[".txt"])
    if name == "docstrings":
        from choosing import docstrings

        queries, documents, _ = map(list, zip(*docstrings(), strict=True))
        pairs = [(query, query) for query in range(len(queries))]
    else:
        texts = collection(name)
        documents, queries = texts.documents, texts.queries
        pairs = [(query, item) for query, right in enumerate(texts.relevant) for item in right]
    embed_texts(paths[".npy"], documents)
    embed_texts(paths["_q.npy"], queries)
    lines = "".join(f"{query}\t{item}\t1\n" for query, item in pairs)
    paths[".tsv"].write_text(lines, encoding="utf-8")
    return replace(cfg, documents=paths[".npy"], queries=paths["_q.npy"], judgements=paths[".tsv"])


def read(cfg: Config) -> "tuple[Tensor, Tensor, Any, Any, Any]":
    """Documents, queries, what is right, labels and the judge's embeddings of the documents."""
    import numpy as np
    import torch
    from scipy.sparse import csr_array
    from torch.nn.functional import normalize

    from ncl_multi.data.arrays import read_embeddings

    def tensor(path: Path) -> "Tensor":
        return torch.from_numpy(np.array(read_embeddings(path)))

    x = tensor(cfg.documents)
    held = slice(len(x) - len(x) // 10, None)
    rows = slice(0, len(x) if cfg.queries is not None else held.start)
    queries = x[held] if cfg.queries is None else tensor(cfg.queries)
    documents = x[rows]
    if cfg.judgements is None:
        near = (normalize(queries, dim=1) @ normalize(documents, dim=1).T).topk(10, dim=1).indices
        place = (np.arange(len(queries)).repeat(10), near.flatten().numpy())
        gain = np.ones(len(place[0]))
    else:
        query, item, gain = np.loadtxt(cfg.judgements, delimiter="\t", ndmin=2).T
        place, gain = (query.astype(int), item.astype(int)), np.maximum(gain, 0)
    right = csr_array((gain, place), shape=(len(queries), len(documents)))
    labels = None
    if cfg.labels is not None:
        lines = cfg.labels.read_text(encoding="utf-8").splitlines()
        labels = torch.from_numpy(np.unique(lines, return_inverse=True)[1])[rows]
    judge = None if cfg.judge is None else tensor(cfg.judge)[rows]
    return documents, queries, right, labels, judge


def readable(documents: Any, labels: Any, judge: Any) -> dict[str, float]:
    """How readable codes are; a measure that does not apply is left out."""
    from ncl_multi.metrics import NotMeasurableError, active_dims, intruder, purity

    row = {"active": active_dims(documents)}
    judged: dict[str, tuple[Any, Any]] = {
        "purity_at_10": (purity, labels),
        "intruder": (intruder, labels if judge is None else judge),
    }
    for name, (formula, truth) in judged.items():
        if truth is not None:
            try:
                row[name] = formula(documents, truth)
            except NotMeasurableError:
                continue
    return row


def compare(cfg: Config) -> list[dict[str, Any]]:
    """One row for each seed, method and k, one more for fuller queries, and one for the whole."""
    from baselines import DENSE, METHODS, Budget

    from ncl_multi.metrics import ndcg_at_k

    documents, queries, right, labels, judge = read(cfg)
    whole = ndcg_at_k(queries, documents, right)
    rows: list[dict[str, Any]] = [
        {"method": "whole", "k": documents.shape[1], "ndcg_at_10": whole, "share": 1.0}
    ]
    methods = cfg.methods or ("ncl", *METHODS)
    for seed in cfg.seeds:
        measured: list[dict[str, Any]] = []
        if "ncl" in methods:
            measured += _of_ours(cfg, seed, documents, queries, right, labels, judge)
        budget = Budget(cfg.dims, cfg.steps, learning_rate=cfg.learning_rate, seed=seed)
        for name in methods:
            for k in cfg.k if name in METHODS else ():
                row = _of_method(name, k, budget, documents, queries, right, labels, judge)
                measured.append(row)
        for row in measured:
            row["share"] = row["ndcg_at_10"] / whole
            row["bytes"] = row["k"] * (4 if row["method"] in DENSE else 6)
            rows.append(row | {"seed": seed})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _of_ours(
    cfg: Config, seed: int, documents: "Tensor", queries: "Tensor", right: Any, *judges: Any
) -> list[dict[str, Any]]:
    """One fit, and rows for queries of k entries, of four times as many, and whole ones."""
    import ncl_multi as ncl
    from ncl_multi.metrics import ndcg_at_k

    started = time.perf_counter()
    coder = ncl.SparseCoder(
        cfg.dims, max(cfg.k), ks=[k for k in cfg.k if k >= 4] or None, steps=cfg.steps,
        random_state=seed,
    ).fit(documents)  # fmt: skip
    seconds = time.perf_counter() - started
    rows = []
    for k in cfg.k:
        z = coder.transform(documents, k=k)
        figures = readable(z, *judges) | {"fit_seconds": seconds}
        entries = {"ncl": k, "ncl_query_4k": 4 * k, "ncl_query_free": cfg.dims}
        for method, of_query in entries.items():
            searching = coder.transform(queries, k=of_query, query=True)
            found = {"ndcg_at_10": ndcg_at_k(searching, z, right)}
            rows.append({"method": method, "k": k} | found | figures)
    return rows


def _of_method(
    name: str, k: int, budget: "Budget", documents: "Tensor", queries: "Tensor", right: Any,
    *judges: Any,
) -> dict[str, Any]:  # fmt: skip
    import torch
    from baselines import DENSE, METHODS

    from ncl_multi.codes.features import to_csr
    from ncl_multi.metrics import ndcg_at_k

    started = time.perf_counter()
    code = METHODS[name](documents, k, budget)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        z, zq = code(documents), code(queries)
    figures: dict[str, Any] = {}
    if name not in DENSE:
        z, zq = to_csr(z), to_csr(zq)
        # Signed dense rows have no dimensions that fire for a few things only.
        figures = readable(z, *judges)
    found = {"ndcg_at_10": ndcg_at_k(zq, z, right), "fit_seconds": seconds}
    return {"method": name, "k": k} | found | figures


def grid(rows: list[dict[str, Any]], measure: str) -> str:
    """A table in markdown: methods by k, the mean of a measure and its spread over seeds.

    Example:
        >>> made = [{"method": "pca", "k": k, "share": k / 4} for k in (1, 2)]
        >>> print(grid(made, "share"))
        | share | 1 | 2 |
        |---|---|---|
        | pca | .250 | .500 |
    """
    from statistics import mean, pstdev

    from ncl_multi.report import markdown

    figures: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if measure in row and row["method"] != "whole":
            of_method = figures.setdefault(row["method"], {})
            of_method.setdefault(str(row["k"]), []).append(row[measure])

    def cell(values: list[float]) -> str:
        shown = f"{mean(values):.3f}"
        shown += f" ({pstdev(values):.3f})" if len(values) > 1 else ""
        return shown.replace("0.", ".")

    cells = {
        name: {k: cell(values) for k, values in of_k.items()} for name, of_k in figures.items()
    }
    return markdown(measure, cells)


def main(cfg: Config) -> None:
    from ncl_multi.report import write_json

    rows = compare(embed(cfg))
    print(f"{cfg.documents}: the whole has an nDCG@10 of {rows[0]['ndcg_at_10']:.3f}")
    for measure in ("share", "purity_at_10", "intruder", "fit_seconds"):
        if any(measure in row for row in rows[1:]):
            print(f"\n{grid(rows, measure)}")
    if cfg.out is not None:
        write_json(cfg.out, rows)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))
