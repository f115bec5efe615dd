"""How should sentence heads be trained? Settings of the recipe compared on validation data.

Quality at k active entries on STS-B dev, SICK train, CISI and docstrings, which are searched with
their first sentence; the splits that are reported (STS-B test, SICK trial, LISA, Cranfield) are
never read. Each setting is trained with every seed by the package's own objective; features, axes
and neighbours are found once. CISI has 76 queries, too few to tell similar heads apart, so it is
also measured which share of the ten nearest documents of its 1,460 documents stay the nearest. The
chosen setting has the highest mean of all these, among those whose contrastive loss is on.

Usage:
    python evals/choose_sentence.py
    python evals/choose_sentence.py --only 0 4 --seeds 0 1 2
"""

from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import tyro
from choosing import Comparison, docstrings

from ncl_multi.log import show_messages

COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"steps": 0},
    {"dims": 192},
    {"contrast": 0.0},
    {"dims": 448},
    {"imitation": 30.0},
    {"lr": 1e-3},
    {"data": "without abstracts"},
    {"contrast": 4.0},
    {"imitation": 0.0},
    {"correlation": 100.0},
    {"steps": 500},
    {"temperature": 0.2},
    {"mined": 0.0},
    {"dims": 768},
    {"dims": 1536},
    {"dims": 3072},
    {"loss": "spectral"},
    {"csr_lr": 3e-4},
    {"csr_lr": 1e-3},
    {"csr_lr": 3e-3},
    {"csr_lr": 1e-3, "dims": 1536},
)
"""What differs from the recipe's defaults. `steps` 0 is the start, not trained; `csr_lr` trains
sentence-transformers' CSR instead, once for each k."""
ACTIVE = (8, 16, 32, 64)


@dataclass(frozen=True)
class Config(Comparison):
    """Settings of sentence heads compared on STS-B dev, SICK train and CISI."""

    only: tuple[int, ...] = ()
    """Places in `COMPARED`; none for all."""
    limit: int = 24_000
    """Examples to train on."""
    model: str = "minilm"
    """As for the recipe."""


@cache
def prepared(cfg: Config) -> tuple[Any, Any, Any]:
    """Texts, their features, and what is judged."""
    from scipy.sparse import csr_array, eye_array

    import ncl_multi as ncl
    from ncl_multi.adapters.sentence.corpus import cached_features
    from ncl_multi.adapters.sentence.data import read_corpus
    from ncl_multi.adapters.sentence.report import TextBenchmarks

    embed = partial(cached_features, ncl.wrap(cfg.model), precision="bf16")
    corpus = read_corpus("broad", cfg.limit)
    judged = TextBenchmarks.of(embed, ("stsb_dev", "sick_train"), ("cisi",))
    texts = docstrings()[:1200]
    queries, answers = embed([t.query for t in texts]), embed([t.document for t in texts])
    judged.searched["docstrings"] = queries, answers, csr_array(eye_array(len(texts)))
    return corpus, embed(corpus.sentences), judged


@cache
def neighbours(cfg: Config, count: int) -> Any:
    """The neighbours of all texts."""
    from ncl_multi.training.neighbours import Neighbours

    return Neighbours(prepared(cfg)[1], count)


@cache
def start(cfg: Config, dims: int) -> tuple[Any, Any]:
    """The mean of the texts and their sparse axes, in both directions."""
    from ncl_multi.adapters.sentence.model import both_directions

    _, h, _ = prepared(cfg)
    centre = h.mean(dim=0)
    return centre, both_directions(h - centre, dims)


def measure(cfg: Config, setting: dict[str, Any], seed: int) -> dict[str, float]:
    """Figures of one setting and seed."""
    from ncl_multi.adapters.sentence.report import Method
    from ncl_multi.metrics import alive

    _, h, judged = prepared(cfg)
    dense = judged.row(Method(lambda h: h), None)["test"]
    methods = (csr if "csr_lr" in setting else trained)(cfg, setting, seed)
    rows = {k: judged.row(method, k) for k, method in methods.items()}
    measured = {f"stsb_dev@{k}": row["dev"]["stsb_spearman"] for k, row in rows.items()}
    measured |= {f"sick_train@{k}": row["train"]["sick_spearman"] for k, row in rows.items()}
    for name, (_, documents, _) in judged.searched.items():
        whole = dense[f"{name}_ndcg_at_10"]
        for k, row in rows.items():
            figures = row["test"]
            measured[f"{name}@{k}"] = figures[f"{name}_ndcg_at_10"] / whole
            for query in ("whole_query", "signed_query"):
                measured[f"{name}_{query}@{k}"] = figures[f"{name}_ndcg_at_10_{query}"] / whole
            measured[f"{name}_neighbours@{k}"] = kept_neighbours(documents, methods[k].code, k)
    return measured | {
        "score": mean(measured.values()),
        "alive": mean(alive(methods[k].code(h)) for k in rows),
    }


def trained(cfg: Config, setting: dict[str, Any], seed: int) -> dict[int, Any]:
    """A head with this setting, the same for every k."""
    import torch
    from torch.utils.data import DataLoader

    from ncl_multi.adapters.sentence.config import SentenceConfig
    from ncl_multi.adapters.sentence.objective import SentenceObjective
    from ncl_multi.adapters.sentence.report import Method
    from ncl_multi.head import HeadOptions
    from ncl_multi.training.batches import Rows
    from ncl_multi.training.fit import fit

    config_fields = {field.name for field in fields(SentenceConfig)}
    changed = {name: value for name, value in setting.items() if name in config_fields}
    untrained = changed.get("steps") == 0
    config = replace(SentenceConfig(), seed=seed, device="cpu", **({} if untrained else changed))
    corpus, h, _ = prepared(cfg)
    examples = corpus.examples
    if setting.get("data") == "without abstracts":
        abstract = torch.tensor([len(text.split()) > 60 for text in corpus.sentences])
        examples = examples[~abstract[examples[:, 1]] | (examples[:, 1] < 0)]
    dims = setting.get("dims", h.shape[1])
    centre, directions = start(cfg, dims)
    torch.manual_seed(seed)
    head = HeadOptions(dims, batch_norm=False).build(h.shape[1])
    head.start_at(directions)
    head.centre_on(centre)
    if not untrained:
        objective = SentenceObjective(head, corpus, h, ACTIVE, config)
        objective.examples.around = neighbours(cfg, config.mined_among)
        loader = DataLoader(
            Rows(examples), config.batch_size, collate_fn=Rows.together, drop_last=True
        )
        fit(objective, loader, config)
    folded: Any = head.fold()
    return dict.fromkeys(ACTIVE, Method(folded, folded[:-1]))


def csr(cfg: Config, setting: dict[str, Any], seed: int) -> dict[int, Any]:
    """CSR of the recipe's `--compare`, a model for each k."""
    from tempfile import TemporaryDirectory

    import ncl_multi as ncl
    from ncl_multi.adapters.sentence.config import SentenceConfig
    from ncl_multi.adapters.sentence.report import baselines

    with TemporaryDirectory() as folder:
        config = replace(
            SentenceConfig(), seed=seed, device="cpu", k=ACTIVE, precision="bf16", out=Path(folder)
        )
        model = ncl.wrap(cfg.model, setting.get("dims"))
        methods = baselines(model, prepared(cfg)[0], config, setting["csr_lr"])
    return {k: methods[f"csr@{k}"] for k in ACTIVE}


def kept_neighbours(documents: Any, code: Any, k: int) -> float:
    """Share of each document's ten nearest documents that are also nearest by codes."""
    import torch
    from torch.nn.functional import normalize

    from ncl_multi.head import top_k

    def nearest(x: Any) -> Any:
        cosines = normalize(x, dim=1) @ normalize(x, dim=1).T
        return cosines.fill_diagonal_(-2).topk(10).indices

    with torch.no_grad():
        dense, coded = nearest(documents), nearest(top_k(code(documents), k))
    return float((dense[:, :, None] == coded[:, None]).any(dim=2).float().mean())


def main(cfg: Config) -> None:
    settings = cfg.changes([COMPARED[place] for place in cfg.only] or COMPARED)
    rows = cfg.show(
        {"setting": setting} | cfg.means(partial(measure, cfg, setting)) for setting in settings
    )
    contrastive = [
        row
        for row in rows
        if row["setting"].get("contrast", 1)
        and row["setting"].get("steps", 1)
        and "csr_lr" not in row["setting"]
    ]
    print("chosen:", max(contrastive, key=lambda row: row["score"])["setting"])


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))
