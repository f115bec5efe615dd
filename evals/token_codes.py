"""Is a head on tokens better than one on whole texts? Both compared at equal stored entries.

Both read the same texts of `broad` with the same encoder, and are trained by the same objective for
as many steps. Validation data only: STS-B dev, SICK train, CISI, and docstrings, which are searched
with their first sentence; `idf` weighs the entries of whole queries by how rare a dimension is
among the training texts.

Usage:
    python evals/token_codes.py
    python evals/token_codes.py --dims 768 3072 --limit 12000
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from choosing import docstrings

from ncl_multi.log import show_messages


@dataclass(frozen=True)
class Config:
    """A head on tokens compared with one on whole texts."""

    dims: tuple[int, ...] = (768, 1536)
    """Widths of heads on tokens; up to twice the encoder's they start on axes, else on clusters."""
    model: str = "minilm"
    """As for the recipe."""
    limit: int = 6_000
    """Examples to train on."""
    steps: int = 150
    """Steps of both."""
    batch_size: int = 128
    """Examples of a step of both."""
    lr: float = 1e-3
    """Highest learning rate of heads on tokens; the other has the recipe's."""
    active: tuple[int, ...] = (8, 16, 32, 64)
    """Numbers of stored entries."""
    seed: int = 0
    """Seed of everything random."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def evaluate(cfg: Config, corpus: Any, dims: int | None) -> dict[str, dict[str, float]]:
    """Rows of a head on tokens of this width, or of the head on whole texts."""
    import torch
    from scipy.sparse import csr_array, eye_array

    import ncl_multi as ncl
    from ncl_multi.adapters.sentence.config import SentenceConfig
    from ncl_multi.adapters.sentence.corpus import cached_features
    from ncl_multi.adapters.sentence.report import Method, TextBenchmarks, whole_codes

    most = max(cfg.active)
    plain = ncl.wrap(cfg.model)
    model, config = plain, SentenceConfig()

    if dims is not None:
        model = ncl.wrap(cfg.model, dims, pooling="tokens", k=most, seed=cfg.seed)
        config = SentenceConfig(lr=cfg.lr)
    model.fit(
        corpus, config, k=cfg.active, steps=cfg.steps, batch_size=cfg.batch_size, seed=cfg.seed,
        precision="bf16",
    )  # fmt: skip
    features: Any = partial(cached_features, plain, precision="bf16")

    def codes(texts: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model.encode(texts, k=model.dims, dense=True)

    same = Method(lambda z: z)
    if dims is None:
        embed, method = features, whole_codes(plain)
    else:
        active = (codes(corpus.sentences[:2000]).topk(most).indices.flatten()).bincount(
            minlength=model.dims
        )
        rare = torch.log(2001 / (1 + active)) + 1
        embed, method = codes, Method(lambda z: z, lambda z: z * rare)
    texts = docstrings()[:1200]
    figures = {}
    for name, read in {"dense": features, "codes": embed}.items():
        judged = TextBenchmarks.of(read, ("stsb_dev", "sick_train"), ("cisi",))
        sides = read([text.query for text in texts]), read([text.document for text in texts])
        judged.searched["docstrings"] = *sides, csr_array(eye_array(len(texts)))
        figures[name] = judged
    whole = figures["dense"].row(same, None)["test"]
    query = "signed_query" if dims is None else "idf_query"
    rows = {}
    for k in cfg.active:
        row = figures["codes"].row(method, k)
        rows[f"{dims or 'whole texts'}@{k}"] = {
            "stsb_dev": row["dev"]["stsb_spearman"],
            "sick_train": row["train"]["sick_spearman"],
        } | {
            measure.replace("signed_query", query): value
            / whole[measure.partition("_ndcg")[0] + "_ndcg_at_10"]
            for measure, value in row["test"].items()
        }
    return rows


def main(cfg: Config) -> None:
    from ncl_multi.adapters.sentence.data import read_corpus
    from ncl_multi.report import print_json, table

    corpus = read_corpus("broad", cfg.limit)
    rows: dict[str, dict[str, float]] = {}
    for dims in (None, *cfg.dims):
        rows |= evaluate(cfg, corpus, dims)
        table(f"tokens, {cfg.limit} examples; nDCG@10 as a share of dense", rows)
    print_json(rows, cfg.out)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))
