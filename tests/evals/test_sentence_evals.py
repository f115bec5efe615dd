"""Evals of sentences: shares of dense, and the stock export judged by stock mteb."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from tiny_text import SENTENCES, tiny_bert, tiny_tokenizer

import ncl_multi as ncl
from ncl_multi.codes.features import Features
from ncl_multi.data.retrieval import Retrieval

EVALS = Path(__file__).parents[2] / "evals"


def script(name):
    return runpy.run_path(str(EVALS / f"{name}.py"), run_name="eval")


def test_retrieval_is_a_share_of_what_the_whole_encoder_reaches():
    dense = {"stsb_spearman": 0.8, "cisi_ndcg_at_10": 0.4}
    ours = {"stsb_spearman": 0.7, "cisi_ndcg_at_10": 0.3, "cisi_ndcg_at_10_whole_query": 0.38}
    rows = script("sentence")["shares"]({"dense": {"test": dense}, "ncl@8": {"test": ours}})
    assert rows["ncl@8"] == pytest.approx(
        {"stsb_spearman": 0.7, "cisi_ndcg_at_10": 0.75, "cisi_ndcg_at_10_whole_query": 0.95}
    )


def test_the_table_says_what_a_measure_is():
    title = script("sentence")["_title"]
    measures = ["stsb_spearman", "lisa_ndcg_at_10", "cranfield_ndcg_at_10_signed_query", "bytes"]
    assert [*map(title, measures)] == ["STS-B", "LISA", "Cranfield, signed query", ""]


def test_the_ways_to_query_a_collection_stand_together(capsys):
    names = ("cisi_ndcg_at_10", "lisa_ndcg_at_10")
    dense = dict.fromkeys(names, 0.4)
    ours = {f"{name}{query}": 0.3 for name in names for query in ("", "_whole_query")}
    module = script("sentence")
    main = module["main"]
    measured = {"dense": {"test": dense}, "ncl@8": {"test": ours}}
    main.__globals__["evaluate"] = lambda *_: measured
    main(module["Config"](runs=(Path("run"),)))
    header, _, whole, short = capsys.readouterr().out.splitlines()[:4]
    assert header == "|  | CISI | CISI, whole query | LISA | LISA, whole query |"
    assert whole == "| dense | 1.000 |  | 1.000 |  |"
    assert short == "| ncl@8 | 0.750 | 0.750 | 0.750 | 0.750 |"


def test_every_setting_that_is_compared_can_be_set():
    from dataclasses import fields

    from ncl_multi.adapters.sentence.config import SentenceConfig

    known = {field.name for field in fields(SentenceConfig)} | {"dims", "data", "csr_lr"}
    assert all(set(setting) <= known for setting in script("choose_sentence")["COMPARED"])


def test_the_clearest_dimensions_are_those_whose_names_hold_for_new_texts():
    train = Features(torch.eye(2).repeat(20, 1), items=["a dog", "a cat"] * 20)
    # The dimension of cats fires for other things, too.
    new = Features(
        torch.eye(2).repeat(10, 1),
        y=torch.tensor([0, 1] * 10),
        items=["the dog", "the cat"] * 5 + ["one dog", "one car"] * 5,
    )
    rows = script("clearest")["clearest"](train, new, count=2, texts=3)
    assert [(row["name"], row["name_fit"]) for row in rows] == [("dog", 1.0), ("cat", 0.5)]
    assert rows[0]["texts"] == ["the dog"] * 3


@pytest.mark.filterwarnings("default")
def test_stock_mteb_judges_the_stock_export(tmp_path, monkeypatch, capsys):
    mteb = pytest.importorskip("mteb")
    from ncl_multi.adapters.sentence.export import export_sentence_transformers

    torch.manual_seed(0)
    model = ncl.wrap(tiny_bert(), 64, processor=tiny_tokenizer(), k=16)
    model.head(torch.randn(50, 32) + 1)
    export_sentence_transformers(model.eval(), tmp_path / "sentence_transformers")
    tasks = script("mteb_tasks")
    judged = Retrieval(SENTENCES, SENTENCES[:3], [[0], [1], [2]])
    made = {"own": tasks["retrieval_task"]("own", judged)}
    made["pairs"] = tasks["sts_task"]("pairs", SENTENCES, SENTENCES[::-1], [1.0, 2, 3, 4, 5, 0])
    table = tmp_path / "kinds.csv"
    rows = [f"{text},{row % 2}" for row, text in enumerate(SENTENCES * 20)]
    table.write_text("\n".join(["text,label", *rows]))
    made |= {name: tasks["task"](name) for name in (f"classes:{table}", f"clusters:{table}")}
    monkeypatch.setitem(tasks["main"].__globals__, "task", made.get)
    tasks["main"](tasks["Config"](tmp_path, tuple(made), active=8))
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scores["active"] == 8
    assert scores["own"]["ndcg_at_10"] == pytest.approx(1)
    assert -1 <= scores["pairs"]["cosine_spearman"] <= 1
    # Texts of the test half are among those that were trained on.
    assert scores[f"classes:{table}"]["accuracy"] > 0.6
    assert 0 <= scores[f"clusters:{table}"]["v_measure"] <= 1
    with pytest.raises(FileNotFoundError, match="does not contain a SparseEncoder"):
        tasks["main"](tasks["Config"](tmp_path / "empty"))
    assert mteb.__version__
