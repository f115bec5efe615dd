"""Sparse sentence embeddings: any Hugging Face encoder, a non-negative head, a few active entries.

Usage:
    python recipes/sentence_ncl.py
    python recipes/sentence_ncl.py --benchmarks --compare
    python recipes/sentence_ncl.py --data reviews.csv --columns review
    python recipes/sentence_ncl.py --data pairs.csv --finetune --lr 2e-5
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from ncl_multi.adapters.sentence.config import SentenceConfig
from ncl_multi.head import Activation
from ncl_multi.log import show_messages


@dataclass(frozen=True)
class Config(SentenceConfig):
    """Sparse sentence embeddings with a non-negative head."""

    out: Path = Path("runs/sentence_ncl")
    """Folder for the checkpoint, the models, the features and the report."""
    data: str = "broad"
    """`broad` (WordNet, SNLI and PubMed), `wordnet`, `snli`; a csv, tsv, jsonl, parquet or txt file
    of texts, documents, pairs or triplets; `hf:<name>` from the hub; a collection to search:
    `cranfield` (NCL_DATA), or a folder in the layout of BEIR."""
    columns: tuple[str, ...] | None = None
    """Columns of the table: a text; anchor and positive; or anchor, positive and hard negative."""
    limit: int | None = 24_000
    """Use at most this many examples; None for all."""
    scored: Literal["stsb", "none"] = "none"
    """Also learn from human scores: those of the STS-B training split, weighed by `--scores`."""
    model: str = "minilm"
    """`minilm`, `mpnet`, `wordllama`, or any encoder on the hub or in a folder."""
    pooling: Literal["mean", "cls", "last", "own"] | None = None
    """How tokens become one vector; None takes the model's own."""
    dims: int | None = None
    """Number of non-negative dimensions; None for the encoder's."""
    hidden_dim: int | None = None
    """Width of a hidden layer in the head; None for a linear head."""
    activation: Activation = "relu"
    """`none` is the signed twin."""
    k: tuple[int, ...] | None = (8, 16, 32, 64)
    """Train for these numbers of active entries in turn; the last is what the model serves."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Precision of the frozen encoder; `fp32` where a processor has no bf16."""
    benchmarks: bool = False
    """Also measure STS-B, and SICK, CISI, LISA and Cranfield if NCL_DATA contains them."""
    compare: bool = False
    """Also train sentence-transformers' CSR, once for each k, and measure PCA."""
    csr_lr: float = 3e-3
    """Highest learning rate of CSR."""
    twin: bool = False
    """Also train the signed twin, with the same seed and budget."""
    onnx: bool = False
    """Also write `model.onnx`."""
    free: ClassVar[tuple[str, ...]] = (
        *SentenceConfig.free,
        "twin",
        "benchmarks",
        "compare",
        "csr_lr",
        "onnx",
    )


def main(cfg: Config) -> None:
    import ncl_multi as ncl
    from ncl_multi.adapters.sentence.data import read_corpus
    from ncl_multi.adapters.sentence.report import baselines, write_report
    from ncl_multi.atlas.page import write_atlas

    seen = [most for most in (cfg.limit, cfg.rows_seen) if most is not None]
    corpus = read_corpus(cfg.data, min(seen, default=None), cfg.scored, cfg.columns)
    model = ncl.wrap(
        cfg.model,
        cfg.dims,
        pooling=cfg.pooling,
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        seed=cfg.seed,
    )
    models = {"ncl": model} | ({"twin": model.signed_twin()} if cfg.twin else {})
    others = baselines(model, corpus, cfg, cfg.csr_lr) if cfg.compare else {}
    for name, model in models.items():
        model.fit(corpus, replace(cfg, out=cfg.out / ("" if name == "ncl" else name)))
    if ncl.is_main():
        write_report(
            models, corpus, others, cfg.out, benchmarks=cfg.benchmarks, onnx=cfg.onnx,
            precision=cfg.precision,
        )  # fmt: skip
        print(f"what each dimension means: {write_atlas(cfg.out)}")


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))
