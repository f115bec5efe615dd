"""How should sentence heads be trained? Settings of the recipe compared on validation data.

Quality at k active entries on STS-B dev, SICK train and CISI; the splits that are reported (STS-B
test, SICK trial, LISA, Cranfield) are never read. Each setting is trained with every seed.

Usage:
    python evals/choose_sentence.py
    python evals/choose_sentence.py --only 0 4 --seeds 0 1 2
"""

import json
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import tyro

COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"correlation": 0.0},
    {"contrast": 0.0},
    {"batch_norm": True},
    {"data": "snli"},
    {"data": "wordnet"},
    {"limit": 8_000},
    {"dims": 384},
    {"dims": 1024},
    {"dims": 2048},
    {"dims": 4096},
    {"start": "random", "lr": 3e-3},
    {"start": "clusters"},
    {"loss": "spectral"},
    {"mined": 0.0},
    {"mined": 1.0},
    {"temperature": 0.05},
    {"temperature": 0.2},
    {"lr": 1e-4},
    {"lr": 1e-3},
    {"steps": 50},
    {"steps": 1000},
)
"""What differs from the recipe's defaults."""


@dataclass(frozen=True)
class Config:
    """Settings of sentence heads compared on STS-B dev, SICK train and CISI."""

    only: tuple[int, ...] = ()
    """Places in `COMPARED`; none for all."""
    seeds: tuple[int, ...] = (0,)
    """Seeds to train with."""
    limit: int = 24_000
    """Examples to train on, where the setting does not say."""
    model: str = "minilm"
    """As for the recipe."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def measure(cfg: Config, setting: dict[str, Any], seed: int) -> dict[str, float]:
    """Figures of one setting and seed, from whole training runs in memory."""
    import ncl_multi as ncl
    from ncl_multi.adapters.sentence.config import SentenceConfig
    from ncl_multi.adapters.sentence.corpus import cached_features
    from ncl_multi.adapters.sentence.data import read_corpus, read_encoder
    from ncl_multi.adapters.sentence.report import TextBenchmarks, quality, whole_codes
    from ncl_multi.metrics import alive

    known = {field.name for field in fields(SentenceConfig)}
    trained = {name: value for name, value in setting.items() if name in known}
    config = replace(SentenceConfig(), seed=seed, device="cpu", precision="bf16", **trained)
    corpus = read_corpus(setting.get("data", "broad"), setting.get("limit", cfg.limit))
    model = ncl.wrap(
        read_encoder(cfg.model),
        setting.get("dims"),
        batch_norm=setting.get("batch_norm", False),
        k=64,
        seed=seed,
    )
    model.fit(corpus, config)
    judged = TextBenchmarks.of(
        partial(cached_features, model, precision="bf16"), ("stsb_dev", "sick_train"), ("cisi",)
    )
    figures = quality(judged, {"ncl": whole_codes(model)}, (8, 16, 32, 64))
    measured = {"alive": alive(model.head.fold()(cached_features(model, corpus.sentences, "bf16")))}
    for k in (8, 16, 32, 64):
        row = figures[f"ncl@{k}"]
        measured[f"stsb_dev@{k}"] = row["dev"]["stsb_spearman"]
        measured[f"sick_train@{k}"] = row["train"]["sick_spearman"]
    dense = figures["dense"]["test"]["cisi_ndcg_at_10"]
    for name in ("cisi_ndcg_at_10", "cisi_ndcg_at_10_whole_query"):
        measured[f"{name}@64 of dense"] = figures["ncl@64"]["test"][name] / dense
    return measured


def main(cfg: Config) -> None:
    from ncl_multi.report import write_json

    rows = []
    for place in cfg.only or range(len(COMPARED)):
        runs = [measure(cfg, COMPARED[place], seed) for seed in cfg.seeds]
        figures = {name: round(mean(run[name] for run in runs), 4) for name in runs[0]}
        rows.append({"setting": COMPARED[place], **figures})
        print(json.dumps(rows[-1]), flush=True)
    if cfg.out is not None:
        write_json(cfg.out, rows)


if __name__ == "__main__":
    main(tyro.cli(Config))
