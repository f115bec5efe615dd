"""Bulk encoding: the codes of `encode`, whatever was killed; every row has a code or a reason."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pa = pytest.importorskip("pyarrow")

from pyarrow import parquet  # noqa: E402
from tiny_text import WORDS, tiny_bert, tiny_tokenizer  # noqa: E402

import ncl_multi as ncl  # noqa: E402
from ncl_multi.bulk import inputs  # noqa: E402
from ncl_multi.bulk.__main__ import main  # noqa: E402
from ncl_multi.bulk.encode import encode_files  # noqa: E402
from ncl_multi.bulk.shards import read_codes  # noqa: E402

TEXTS = [" ".join(np.random.default_rng(n).choice(WORDS, 1 + n % 7)) for n in range(50)]
IDS = [f"item {n}" for n in range(50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bulk") / "model"
    torch.manual_seed(0)
    built = ncl.wrap(tiny_bert(), 64, processor=tiny_tokenizer(), k=8)
    built.head(torch.randn(50, 32))
    built.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts.jsonl")


def write(path):
    """The same texts in any kind of file."""
    rows = [{"id": name, "text": text} for name, text in zip(IDS, TEXTS, strict=True)]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".jsonl":
        path.write_text("\ufeff" + "\n".join(map(json.dumps, rows)))
    elif path.suffix == ".txt":
        path.write_text("\n".join(TEXTS) + "\n")
    else:
        path.write_text("\n".join(["id,text", *(f"{r['id']},{r['text']}" for r in rows), ""]))
    return path


def content(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def refused(folder):
    files = [path.read_text() for path in sorted(folder.glob("rejects-*"))]
    return [json.loads(line) for file in files for line in file.splitlines()]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "csv"])
def test_shards_hold_the_codes_of_encode(model, tmp_path, kind):
    path = write(tmp_path / f"texts.{kind}")
    columns = {"column": "text", "id_column": "id"} if kind == "csv" else {}
    counts = encode_files(model, path, tmp_path / "out", shard_rows=12, **columns)
    assert counts == {"rows": 50, "rejects": 0, "shards": 5, "new": 5}
    parts = list(read_codes(tmp_path / "out"))
    assert np.concatenate([part.rows for part in parts]).tolist() == list(range(50))
    names = [name for part in parts for name in part.ids]
    assert names == ([None] * 50 if kind == "txt" else IDS)
    want = ncl.load(model).encode(TEXTS, dense=True)
    got = torch.cat([torch.from_numpy(part.z.toarray()) for part in parts])
    torch.testing.assert_close(got, want)


def test_a_shard_is_plain_parquet_with_its_origin(model, texts, tmp_path):
    encode_files(model, texts, tmp_path / "out", k=3)
    table = parquet.read_table(tmp_path / "out" / "codes-00000.parquet")
    assert {field.name: str(field.type) for field in table.schema} == {
        "row": "int64", "id": "string",
        "indices": "list<element: int32>", "values": "list<element: float>",
    }  # fmt: skip
    about = json.loads(table.schema.metadata[b"ncl_multi"])
    assert about["dims"] == 64
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert about["model"] == manifest["model"]["fingerprint"]
    assert max(len(row) for row in table["indices"].to_pylist()) == 3


def test_a_folder_of_files_is_one_input(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "a dog"}\n{"text": "a cat"}\n')
    (tmp_path / "in" / "a.txt").write_text("the mat\n")
    counts = encode_files(model, tmp_path / "in", tmp_path / "out")
    assert counts["rows"] == 3
    assert [part.rows.tolist() for part in read_codes(tmp_path / "out")] == [[0], [1, 2]]


def test_unreadable_lines_are_refused_with_their_reason(model, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MOST_LINE", 60)
    lines = [
        b'{"text": "a dog"}', b"", b'{"text": 3}', b'{"text"', b'{"text": "\xff"}', b'["a"]',
        b'{"other": "a"}', b'{"text": " "}', b'{"text": null}', b'{"text": "\\ud800"}',
        b'{"text": "' + b"a " * 99 + b'"}', b'{"text": "a cat"}',
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    counts = encode_files(model, tmp_path / "in.jsonl", tmp_path / "out", shard_rows=4)
    assert (counts["rows"], counts["rejects"]) == (2, 10)
    (first, second, third) = read_codes(tmp_path / "out")
    assert (first.rows.tolist(), second.rows.tolist(), third.rows.tolist()) == ([0], [], [11])
    reasons = {row["row"]: row["reason"] for row in refused(tmp_path / "out")}
    expected = [
        "is empty", "int, not a string", "is not JSON", "not UTF-8", "must be an object",
        "no 'text'", "is empty", "is missing", "not valid Unicode", "longer than",
    ]  # fmt: skip
    assert list(reasons) == list(range(1, 11))
    for reason, words in zip(reasons.values(), expected, strict=True):
        assert words in reason
    assert refused(tmp_path / "out")[0]["where"] == "in.jsonl line 2"


def changed_shard(folder, about=None, **columns):
    """Replace columns or metadata of the first shard."""
    path = folder / "codes-00000.parquet"
    table = parquet.read_table(path)
    stored = json.loads(table.schema.metadata[b"ncl_multi"]) | (about or {})
    columns = {name: table[name] for name in table.column_names} | columns
    metadata = {"ncl_multi": json.dumps(stored)}
    parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), path)


NARROW = pa.list_(pa.int32())
ONES = pa.array([[1.0]] * 3, pa.list_(pa.float32()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": pa.array([[2**20], [1], [2]], NARROW), "values": ONES}, "must be < 4096"),
        ({"indices": pa.array([[-1], [1], [2]], NARROW), "values": ONES}, "damaged: .*indices"),
        ({"indices": pa.array([None, [1], [2]], NARROW)}, "is damaged"),
        ({"indices": pa.array(["a", "b", "c"])}, "its columns must be"),
        ({"row": pa.array([0.5, 1, 2])}, "its columns must be"),
        ({"about": {"dims": "wide"}}, "was not written by ncl-encode"),
        ({"about": {"rejects": None}}, "was not written by ncl-encode"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(model, tmp_path, change, words):
    (tmp_path / "in.txt").write_text("a dog\na cat\nthe mat\n")
    out = tmp_path / "out"
    encode_files(model, tmp_path / "in.txt", out)
    (whole,) = read_codes(out)
    changed_shard(out, {"dims": 4096})
    assert next(read_codes(out)).z.shape == (3, 4096)
    assert whole.z.nnz
    changed_shard(out, **{"about": {"dims": 4096}} | change)
    with pytest.raises(ValueError, match=words):
        list(read_codes(out))


def test_shards_that_repeat_themselves_without_end_are_refused(model, tmp_path):
    (tmp_path / "in.txt").write_text("a dog\n")
    encode_files(model, tmp_path / "in.txt", tmp_path / "out")
    many = 2 * 10**7
    changed_shard(
        tmp_path / "out", row=pa.array(np.zeros(many, np.int64)), id=pa.nulls(many, pa.string()),
        indices=pa.nulls(many, NARROW), values=pa.nulls(many, pa.list_(pa.float32())),
    )  # fmt: skip
    assert (tmp_path / "out" / "codes-00000.parquet").stat().st_size < 2**20
    with pytest.raises(ValueError, match="would take more than"):
        list(read_codes(tmp_path / "out"))


@pytest.mark.parametrize("input_", [{}, {"shards": "many"}, 3, {"shards": 10**12}])
def test_a_manifest_with_another_number_of_shards_is_refused(model, tmp_path, input_):
    (tmp_path / "in.txt").write_text("a dog\n")
    encode_files(model, tmp_path / "in.txt", tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"input": input_}))
    with pytest.raises(ValueError, match=r"number of shards|codes-00001.parquet is missing"):
        list(read_codes(tmp_path / "out"))


def test_a_damaged_row_group_is_refused_row_by_row(model, tmp_path):
    path = tmp_path / "texts.parquet"
    table = pa.table({"text": TEXTS})
    parquet.write_table(table, path, row_group_size=10, compression="zstd", use_dictionary=False)
    start = parquet.read_metadata(path).row_group(2).column(0).data_page_offset
    damaged = bytearray(path.read_bytes())
    damaged[start : start + 40] = b"\xff" * 40
    path.write_bytes(bytes(damaged))
    counts = encode_files(model, path, tmp_path / "out", shard_rows=25)
    assert (counts["rows"], counts["rejects"]) == (40, 10)
    first, second = read_codes(tmp_path / "out")
    assert (first.rows[-1], second.rows[0]) == (19, 30)
    assert [row["row"] for row in refused(tmp_path / "out")] == list(range(20, 30))


def test_texts_that_a_small_file_repeats_without_end_are_refused_row_by_row(tmp_path):
    path, long = tmp_path / "texts.parquet", "a dog runs " * 60_000

    def rows(row_group_size):
        parquet.write_table(pa.table({"text": [long] * 200}), path, row_group_size=row_group_size)
        source = inputs.open_input(path, 200, column="text")
        return list(source.read(source.parts[0]))

    assert {row.item for row in rows(100)} == {long}
    assert 100 * path.stat().st_size < 100_000_000 < 200 * len(long)
    refused_rows = rows(200)
    assert len(refused_rows) == 200
    assert all("bytes, more than" in row.reason for row in refused_rows)


def test_a_row_that_the_model_refuses_takes_no_other_with_it(model, texts, tmp_path, monkeypatch):
    real = ncl.NonNegEncoder._features

    def with_nan(self, items):
        h = real(self, items)
        h[[item == TEXTS[20] for item in items]] = float("nan")
        return h

    monkeypatch.setattr(ncl.NonNegEncoder, "_features", with_nan)
    bad = [row for row, text in enumerate(TEXTS) if text == TEXTS[20]]
    assert encode_files(model, texts, tmp_path / "out")["rows"] == 50 - len(bad)
    assert [row["row"] for row in refused(tmp_path / "out")] == bad
    assert "NaN" in refused(tmp_path / "out")[0]["reason"]


def test_pictures_are_encoded_and_damaged_ones_refused(tmp_path):
    pytest.importorskip("timm")
    from PIL import Image

    torch.manual_seed(0)
    vision = ncl.NonNegVision("resnet-small", dims=16, hidden_dim=None)
    vision.save_pretrained(tmp_path / "model")
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("b.png", "deep/a.png"):
        Image.new("RGB", (40, 30), "red").save(tmp_path / "in" / name)
    (tmp_path / "in" / "c.png").write_bytes((tmp_path / "in" / "b.png").read_bytes()[:50])
    counts = encode_files(tmp_path / "model", tmp_path / "in", tmp_path / "out")
    assert (counts["rows"], counts["rejects"]) == (2, 1)
    (codes,) = read_codes(tmp_path / "out")
    assert codes.ids == ["b.png", "deep/a.png"]
    want = ncl.load(tmp_path / "model").encode([tmp_path / "in" / "b.png"], dense=True)
    torch.testing.assert_close(torch.from_numpy(codes.z.toarray())[:1], want)


@pytest.mark.parametrize("kind", ["vision", "sentence"])
def test_rows_of_a_table_are_no_paths_for_models_of_pictures(tmp_path, kind):
    pytest.importorskip("timm")
    import transformers
    from PIL import Image

    Image.new("RGB", (40, 30), "red").save(tmp_path / "private.png")
    if kind == "vision":
        pictures = ncl.NonNegVision("test_resnet", dims=16, hidden_dim=None)
    else:
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.ViTConfig(**size, intermediate_size=16, image_size=16, patch_size=8)
        processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
        pictures = ncl.wrap(transformers.ViTModel(config), 16, processor=processor)
    pictures.save_pretrained(tmp_path / "model")
    private = str(tmp_path / "private.png")
    assert ncl.load(tmp_path / "model").encode([private]).shape == (1, 16), "of the caller"
    (tmp_path / "table.txt").write_text(f"{private}\n")
    with pytest.raises(ValueError, match=f"has text, which this model of kind {kind}"):
        encode_files(tmp_path / "model", tmp_path / "table.txt", tmp_path / "out")


def in_another_process(work):
    """Run `work` in a copy of this process; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_killed_run_resumes_to_the_same_bytes(model, texts, tmp_path, monkeypatch):
    options = {"shard_rows": 12, "progress": False}
    encode_files(model, texts, tmp_path / "whole", **options)

    def killed():
        real = parquet.write_table

        def write_half(table, path, **given):
            real(table, path, **given)
            if "00002" in path.name:
                path.write_bytes(path.read_bytes()[:100])
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(parquet, "write_table", write_half)
        encode_files(model, texts, tmp_path / "out", **options)

    assert in_another_process(killed) == -signal.SIGKILL
    assert len(list((tmp_path / "out").glob("codes-*"))) == 2
    assert list((tmp_path / "out").glob(".*.part"))
    with pytest.raises(ValueError, match=r"is unfinished: codes-00002.parquet is missing, 3 of 5"):
        list(read_codes(tmp_path / "out"))
    counts = encode_files(model, texts, tmp_path / "out", **options)
    assert counts == {"rows": 50, "rejects": 0, "shards": 5, "new": 3}
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".*.part"))
    assert encode_files(model, texts, tmp_path / "out", **options)["new"] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_full_disk_leaves_whole_shards_only(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a dog\n")
    (tmp_path / "in" / "b.txt").write_text("".join(f"{text}\n" for text in TEXTS * 40))

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            encode_files(model, tmp_path / "in", tmp_path / "out", progress=False)
        except OSError as error:
            os._exit(7 if "stopped after 1 of 2 shards, which are whole" in str(error) else 1)

    assert in_another_process(full) == 7
    assert set(content(tmp_path / "out")) == {"manifest.json", "codes-00000.parquet"}
    counts = encode_files(model, tmp_path / "in", tmp_path / "out", progress=False)
    assert counts == {"rows": 2001, "rejects": 0, "shards": 2, "new": 1}


def test_the_folder_of_another_run_is_refused_and_untouched(model, texts, tmp_path):
    encode_files(model, texts, tmp_path / "out", shard_rows=25)
    before = content(tmp_path / "out")
    torch.manual_seed(1)
    other = ncl.wrap(tiny_bert(), 64, processor=tiny_tokenizer(), k=8, seed=1)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="belongs to another run: its model is"):
        encode_files(tmp_path / "other", texts, tmp_path / "out", shard_rows=25)
    with pytest.raises(ValueError, match="its options is"):
        encode_files(model, texts, tmp_path / "out", shard_rows=25, k=3)
    texts.write_text(texts.read_text().replace("item 7", "item 8"))
    with pytest.raises(ValueError, match="its input is"):
        encode_files(model, texts, tmp_path / "out", shard_rows=25)
    assert content(tmp_path / "out") == before
    with pytest.raises(ValueError, match=r"contains other and no manifest.json"):
        encode_files(model, texts, tmp_path)


def test_what_cannot_be_an_input_is_refused(model, tmp_path):
    def message(path, **options):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            encode_files(model, path, tmp_path / "out", **options)
        return str(error.value)

    assert "does not exist" in message(tmp_path / "missing.jsonl")
    (tmp_path / "empty").mkdir()
    assert "has no files that end in" in message(tmp_path / "empty")
    (tmp_path / "empty.txt").touch()
    assert "has no rows" in message(tmp_path / "empty.txt")
    (tmp_path / "wide.txt").write_text("a dog", encoding="utf-16")
    assert "save it as UTF-8" in message(tmp_path / "wide.txt")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    assert "not a whole parquet file" in message(tmp_path / "cut.parquet")
    path = write(tmp_path / "texts.parquet")
    assert "no column 'body' with text" in message(path, column="body")
    assert "no column 'key' for --id-column" in message(path, id_column="key")
    assert "at least 1; got 0" in message(path, shard_rows=0)
    assert not (tmp_path / "out").exists()


def test_the_command_prints_counts_and_errors(model, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ncl-encode", str(model), str(texts), str(tmp_path / "out")])
    main()
    assert json.loads(capsys.readouterr().out)["rows"] == 50
    texts.write_text("no JSON\n" + texts.read_text())
    with pytest.raises(SystemExit, match=r"^ncl-encode: .*another run"):
        main()


def test_lines_are_found_from_any_place(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_BLOCK", 7)
    lines = ["a" * (n % 5) + "b" for n in range(40)]
    path = tmp_path / "in.txt"
    for end in ("", "\n"):
        path.write_text("\n".join(lines) + end)
        for size in (1, 3, 8, 40, 50):
            opened = inputs.open_input(path, size)
            rows = [row for part in opened.parts for row in opened.read(part)]
            assert [row.item for row in rows] == lines
            assert [row.row for row in rows] == list(range(40))


def test_with_ray_a_killed_worker_loses_nothing(model, tmp_path):
    pytest.importorskip("ray")
    psutil = pytest.importorskip("psutil")
    source, out = tmp_path / "in.txt", tmp_path / "out"
    source.write_text("".join(f"{text}\n" for text in TEXTS * 20))
    encode_files(model, source, tmp_path / "local", shard_rows=20, progress=False)
    # A process of its own: Ray cannot be forked from one where others use gRPC, as Milvus does.
    command = [sys.executable, "-m", "ncl_multi.bulk", str(model), str(source), str(out)]
    command += ["--shard-rows", "20", "--no-progress", "--engine", "ray"]
    running = subprocess.Popen(command, stdout=-1, stderr=-1, text=True)
    victims = []
    while not victims and running.poll() is None:
        time.sleep(0.05)
        if len(list(out.glob("codes-*"))) > 1:
            for child in psutil.Process(running.pid).children(recursive=True):
                if "_RayWorker" in " ".join(child.cmdline()):
                    victims.append(child.pid)
            os.kill(victims[0], signal.SIGKILL)
    output, errors = running.communicate()
    assert len(victims) == 2, errors[-2000:]
    counts = json.loads(output.splitlines()[-1])
    assert counts == {"rows": 1000, "rejects": 0, "shards": 50, "new": 50}
    assert content(out) == content(tmp_path / "local")
