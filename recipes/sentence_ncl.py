"""Sparse sentence embeddings: any Hugging Face encoder, a non-negative head, a few active dims.

Usage:
    python recipes/sentence_ncl.py
    python recipes/sentence_ncl.py --model sentence-transformers/all-mpnet-base-v2 --dims 2048
    python recipes/sentence_ncl.py --data reviews.csv --columns review
    python recipes/sentence_ncl.py --data documents.txt --contrast 1 --correlation 0
    python recipes/sentence_ncl.py --data pairs.csv --finetune --lr 2e-5
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from ncl_multi.adapters.sentence.config import SentenceConfig
from ncl_multi.head import Activation


@dataclass(frozen=True)
class Config(SentenceConfig):
    """Sparse sentence embeddings with a non-negative head."""

    out: Path = Path("runs/sentence_ncl")
    """Folder for the checkpoint, the models, the features and the report."""
    data: str = "snli"
    """`snli`; a csv, tsv, jsonl or parquet file of sentences, pairs or triplets; `hf:<name>` from
    the hub; or what is to be searched: `cranfield` (NCL_DATA), or a txt file with one document per
    line."""
    columns: tuple[str, ...] | None = None
    """Columns of the file with the text, its positive and its negative; None finds them out."""
    limit: int | None = 8000
    """Use the first so many examples of `data`; None for all."""
    texts: Literal["stsb", "none"] | None = None
    """Also learn from these pairs and their human scores: the STS-B training split. None does so
    for `snli` only."""
    model: str = "minilm"
    """`minilm`, or any encoder on the hub or in a folder."""
    pooling: Literal["mean", "cls", "last", "own"] | None = None
    """How tokens become one vector; None takes the model's own."""
    dims: int | None = None
    """Number of non-negative dimensions; None for twice the encoder's width."""
    hidden_dim: int | None = None
    """Width of a hidden layer in the head; None for a linear head."""
    activation: Activation = "relu"
    """`none` is the signed twin."""
    k: tuple[int, ...] | None = (8, 16, 32, 64)
    """Train for these numbers of active dimensions at once; the last is what the model serves."""
    contrast: float = 0.0
    """Weight of the loss of pairs and triplets; single sentences are paired with a noisy copy."""
    scored: float = 0.5
    """Weight of the correlation with human scores; 0 takes the sentences without them."""
    compare: bool = False
    """Also train sentence-transformers' CSR, once for each k, and measure PCA; on data of your own,
    judge by STS-B, too."""
    csr_steps: int = 75
    """Steps for each of them; with four k, ours takes as many for all together."""
    csr_lr: float = 1e-3
    """Highest learning rate of CSR."""
    twin: bool = False
    """Also train the signed twin, with the same seed and budget."""
    onnx: bool = False
    """Also write `model.onnx`."""
    free: ClassVar[tuple[str, ...]] = (
        *SentenceConfig.free,
        "twin",
        "compare",
        "csr_steps",
        "csr_lr",
        "onnx",
    )


def main(cfg: Config) -> None:
    import ncl_multi as ncl
    from ncl_multi import data
    from ncl_multi.adapters.sentence.data import read_corpus
    from ncl_multi.adapters.sentence.report import baselines, write_report
    from ncl_multi.atlas.page import write_atlas

    named = cfg.data in ("snli", "cranfield")
    texts = cfg.texts or ("stsb" if cfg.data == "snli" else "none")
    corpus = read_corpus(cfg.data, cfg.limit, texts, cfg.rows_seen, cfg.columns)
    source = str(data.minilm()) if cfg.model == "minilm" else cfg.model
    model = ncl.wrap(
        source,
        cfg.dims,
        pooling=cfg.pooling,
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        seed=cfg.seed,
    )
    models = {"ncl": model} | ({"twin": model.signed_twin()} if cfg.twin else {})
    others = baselines(model, corpus, cfg) if cfg.compare else {}
    for name, own in models.items():
        own.fit(corpus, replace(cfg, out=cfg.out / ("" if name == "ncl" else name)))
    if ncl.is_main():
        judged = named or cfg.compare
        write_report(models, corpus, others, cfg.out, onnx=cfg.onnx, benchmarks=judged)
        print(f"what each dimension means: {write_atlas(cfg.out)}")


if __name__ == "__main__":
    main(tyro.cli(Config))
