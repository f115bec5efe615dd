"""How does stock mteb judge a sentence run? The export, loaded as a stock `SparseEncoder`.

This package does not encode here: `sentence_transformers/sparse_encoder` of the run is what any
user of the export would load. Tasks are names that mteb knows, which it loads from the hub; or
our own, which need no hub: `stsb`, `sick`, `cranfield`, folders in the layout of BEIR, and tables
of a text and a label, as `classes:<file>` and `clusters:<file>`.

Usage:
    python evals/mteb_tasks.py runs/sentence_ncl --tasks stsb sick cisi
    python evals/mteb_tasks.py runs/sentence_ncl --tasks classes:wordnet clusters:reviews.csv
    python evals/mteb_tasks.py runs/sentence_ncl --tasks STS16 Banking77Classification --active 32
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ncl_multi.log import show_messages
from ncl_multi.optional import needs

if TYPE_CHECKING:
    from ncl_multi.data.retrieval import Retrieval


@dataclass(frozen=True)
class Config:
    """Scores of stock mteb for the stock export of a sentence run."""

    run: tyro.conf.Positional[Path]
    """Folder written by recipes/sentence_ncl.py, or of any SparseEncoder."""
    tasks: tuple[str, ...] = ("stsb", "sick", "cisi", "cranfield")
    """Names that mteb knows; `stsb`, `sick`, `cranfield`; folders in the layout of BEIR, or their
    names in NCL_DATA/retrieval; `classes:<file>` and `clusters:<file>` of a table with columns text
    and label, or of `wordnet`: its held-out entries and their categories."""
    active: int | None = None
    """Keep only this many entries of a row; None takes the number the model was exported with."""
    out: Path | None = None
    """File for the scores as JSON; none to print them only."""


def task(name: str) -> Any:
    """A task that mteb knows, or one made of our data."""
    import mteb

    from ncl_multi import data

    if name in ("stsb", "sick"):
        read, split = (data.stsb, "test") if name == "stsb" else (data.sick, "trial")
        return sts_task(f"{name}-{split}", *read(split))
    kind, _, source = name.partition(":")
    if kind in ("classes", "clusters"):
        make = classification_task if kind == "classes" else clustering_task
        return make(f"{kind}-{Path(source).stem}", *labelled(source))
    try:
        collection = data.collection(name)
    except FileNotFoundError as error:
        try:
            return mteb.get_task(name)
        except KeyError:
            raise ValueError(f"{name} is not a task of mteb, and {error}") from None
    return retrieval_task(Path(name).name, collection)


def sts_task(name: str, first: list[str], second: list[str], scores: list[float]) -> Any:
    """Pairs of sentences with human scores, as a task of mteb."""
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS

    class Pairs(AbsTaskSTS):
        metadata = _metadata(name, "STS", "cosine_spearman")
        min_score, max_score = int(min(scores)), int(max(scores))

        def load_data(self, *_: Any, **__: Any) -> None:
            columns = {"sentence1": first, "sentence2": second, "score": scores}
            self.dataset = {"test": Dataset.from_dict(columns)}
            self.data_loaded = True

    return Pairs()


def retrieval_task(name: str, searched: "Retrieval") -> Any:
    """A collection of documents and queries as a task of mteb."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    def texts(column: list[str]) -> Dataset:
        return Dataset.from_dict({"id": [str(row) for row in range(len(column))], "text": column})

    class Search(AbsTaskRetrieval):
        metadata = _metadata(name, "Retrieval", "ndcg_at_10")

        def load_data(self, *_: Any, **__: Any) -> None:
            relevant = {
                str(query): {str(row): 1 for row in rows}
                for query, rows in enumerate(searched.relevant)
            }
            split: Any = {
                "corpus": texts(searched.documents),
                "queries": texts(searched.queries),
                "relevant_docs": relevant,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return Search()


def labelled(source: str) -> tuple[list[str], list[str]]:
    """Texts and their labels: of a table with these columns, or held-out entries of WordNet."""
    from ncl_multi.adapters.sentence.data import held_out
    from ncl_multi.data.tables import read_table
    from ncl_multi.data.words import CATEGORIES

    if source == "wordnet":
        texts, categories = held_out()
        return texts, [CATEGORIES[category] for category in categories]
    rows = read_table(source, columns=["text", "label"]).rows
    return [text for text, _ in rows], [label for _, label in rows]


def classification_task(name: str, texts: list[str], labels: list[str]) -> Any:
    """Texts whose class is predicted, as a task of mteb: a random half is trained on."""
    from datasets import Dataset
    from mteb.abstasks.classification import AbsTaskClassification

    class Classes(AbsTaskClassification):
        metadata = _metadata(name, "Classification", "accuracy")

        def load_data(self, *_: Any, **__: Any) -> None:
            number = {label: place for place, label in enumerate(sorted(set(labels)))}
            columns = {"text": texts, "label": [number[label] for label in labels]}
            rows = Dataset.from_dict(columns)
            self.dataset = {"default": rows.train_test_split(0.5, seed=0)}
            self.data_loaded = True

    return Classes()


def clustering_task(name: str, texts: list[str], labels: list[str]) -> Any:
    """Texts whose clusters should be their labels, as a task of mteb."""
    from datasets import Dataset
    from mteb.abstasks.clustering import AbsTaskClustering

    class Clusters(AbsTaskClustering):
        metadata = _metadata(name, "Clustering", "v_measure")
        max_fraction_of_documents_to_embed = None

        def load_data(self, *_: Any, **__: Any) -> None:
            columns = {"sentences": texts, "labels": labels}
            self.dataset = {"test": Dataset.from_dict(columns)}
            self.data_loaded = True

    return Clusters()


def _metadata(name: str, kind: str, score: str) -> Any:
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata.model_validate(
        {
            "name": name, "description": name, "type": kind, "main_score": score,
            "dataset": {"path": name, "revision": "local"}, "eval_splits": ["test"],
            "eval_langs": ["eng-Latn"],
        }
    )  # fmt: skip


def main(cfg: Config) -> None:
    with needs("ncl-multi[mteb]"):
        import mteb
    from sentence_transformers import SparseEncoder

    from ncl_multi.report import print_json, table

    folder = cfg.run / "sentence_transformers" / "sparse_encoder"
    folder = folder if folder.is_dir() else cfg.run
    if not (folder / "modules.json").is_file():
        raise FileNotFoundError(
            f"{folder} does not contain a SparseEncoder: run recipes/sentence_ncl.py first"
        )
    model = SparseEncoder(str(folder))
    if cfg.active is not None:
        model.max_active_dims = cfg.active
    rows = {}
    for name in cfg.tasks:
        judge = task(name)
        (scores,) = mteb.evaluate(model, judge, cache=None, show_progress_bar=False).task_results
        rows[name] = {judge.metadata.main_score: scores.get_score()}
    active = {"active": model.max_active_dims or model.get_embedding_dimension()}
    table(f"mteb {mteb.__version__}: {folder}", rows)
    print_json(active | rows, cfg.out)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))
