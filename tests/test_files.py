"""The gate for files: saves that are whole after a kill, and reads that look first."""

import io
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ncl_multi import files
from ncl_multi.files import (
    Expected,
    _bytes_per_pixel,
    atomic,
    atomic_folder,
    link_equal_files,
    lock_folder,
    most_memory,
    read_json,
    read_picture,
    read_safetensors,
)

# Children are forked from a process that has little but the module under test.
KILLS = """
import importlib.util, os, random, signal, sys, time
from pathlib import Path

spec = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
sys.modules["files"] = files
spec.loader.exec_module(files)
path, kills = Path(sys.argv[2]), int(sys.argv[3])

def save(version):
    with files.atomic_folder(path) as new:
        (new / "deep").mkdir()
        for name in ("a", "deep/b", "c"):
            (new / name).write_text(f"{version:09d}" * 5000)

save(0)
whole, swapped, chance = 0, set(), random.Random(0)
for kill in range(kills):
    child = os.fork()
    if child == 0:
        for version in range(1000 * kill, 1000 * kill + 1000):
            save(version)
        os._exit(0)
    time.sleep(chance.uniform(0.002, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = {file.relative_to(path).as_posix(): file.read_text()
             for file in path.rglob("*") if file.is_file()}
    whole += set(found) == {"a", "deep/b", "c"} and len(set(found.values())) == 1
    swapped.add(found["a"])
print(whole, len(swapped))
save(1)
print(*sorted(file.name for file in path.parent.iterdir() if not file.name.endswith(".lock")))
"""


def write(folder: Path, **content: str) -> None:
    with atomic_folder(folder) as new:
        for name, text in content.items():
            (new / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def visible(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.endswith(".lock"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_hundred_kills_leave_a_hundred_whole_folders(tmp_path):
    command = [sys.executable, "-c", KILLS, files.__file__, str(tmp_path / "model"), "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts, left = done.stdout.splitlines()
    whole, versions = map(int, counts.split())
    assert whole == 100
    assert versions > 3, "the kills came before anything was saved"
    assert left == "model", "what killed processes left is gone after the next save"


@pytest.mark.parametrize("can_swap", [True, False])
def test_the_new_folder_takes_the_place_of_the_old(tmp_path, monkeypatch, can_swap):
    if not can_swap:
        monkeypatch.setattr(files, "_swap", lambda one, other: False)
    model = tmp_path / "runs" / "model"
    write(model, a="1", b="1")
    write(model, a="2")
    assert content(model) == {"a": "2", "b": "1"}
    assert visible(model.parent) == ["model"]


def test_what_the_save_did_not_write_stays(tmp_path):
    write(tmp_path / "model", config="1")
    (tmp_path / "model" / ".git").mkdir()
    (tmp_path / "model" / ".git" / "HEAD").write_text("main")
    (tmp_path / "model" / "link").symlink_to("config")
    write(tmp_path / "model", config="2")
    assert (tmp_path / "model" / ".git" / "HEAD").read_text() == "main"
    assert (tmp_path / "model" / "link").read_text() == "2"


def test_an_error_while_saving_leaves_the_old_folder(tmp_path):
    write(tmp_path / "model", a="1")

    def fail() -> None:
        with atomic_folder(tmp_path / "model") as new:
            (new / "a").write_text("2")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert content(tmp_path / "model") == {"a": "1"}
    assert visible(tmp_path) == ["model"]


def test_an_error_between_two_renames_leaves_the_old_folder(tmp_path, monkeypatch):
    write(tmp_path / "model", a="1")
    monkeypatch.setattr(files, "_swap", lambda one, other: False)
    rename = Path.rename

    def refuse_the_part(self, target):
        if self.name.endswith(".part"):
            raise OSError("busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_part)
    with pytest.raises(OSError, match="busy"):
        write(tmp_path / "model", a="2")
    assert content(tmp_path / "model") == {"a": "1"}


def test_a_kill_between_two_renames_is_mended_by_the_next_save(tmp_path):
    write(tmp_path / "model", a="1", b="1")
    (tmp_path / "model").rename(tmp_path / ".model.old")
    write(tmp_path / "model", a="2")
    assert content(tmp_path / "model") == {"a": "2", "b": "1"}
    assert visible(tmp_path) == ["model"]


def test_a_full_disk_leaves_the_old_folder(tmp_path):
    write(tmp_path / "model", a="1")
    script = f"""
import resource
from ncl_multi.files import atomic_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))
with atomic_folder({str(tmp_path / "model")!r}) as new:
    (new / "a").write_text("2" * 100_000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "File too large" in done.stderr
    assert content(tmp_path / "model") == {"a": "1"}
    assert visible(tmp_path) == ["model"]


def test_the_current_folder_and_files_are_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("1")
    monkeypatch.chdir(tmp_path)
    for path in (".", "file"):
        with pytest.raises(ValueError, match="a folder other than the current one"):
            write(Path(path), a="1")
    assert (tmp_path / "file").read_text() == "1"


def test_a_folder_is_locked_for_one_process_until_it_ends(tmp_path):
    script = f"""
import sys
from ncl_multi.files import lock_folder
with lock_folder({str(tmp_path)!r}):
    print("locked", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        with (
            pytest.raises(ValueError, match=f"another process is writing to {tmp_path}"),
            lock_folder(tmp_path),
        ):
            pass
        other.kill()
    with lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"dims": 8}', None),
        ('{"dims": 8, "k": 2}', None),
        ("[]", "must contain a JSON object; got list"),
        ("{", "not valid JSON, or was cut short"),
        ("{}", r"missing: \['dims'\]"),
        ('{"dims": 8, "auto_map": 1}', r"unknown: \['auto_map'\]"),
        ('{"dims": ' + "[" * 100_000 + "]" * 100_000 + "}", "more than 32 levels deep"),
        ('{"dims": ' + "[" * 40 + "]" * 40 + "}", "more than 32 levels deep"),
        ('{"dims": "' + "8" * 2**20 + '"}', "larger than 1048576 bytes"),
        ('{"dims": "\xff"}', "not valid JSON"),
    ],
)
def test_json_is_read_only_as_expected(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    if message is None:
        assert read_json(path, keys=["dims"], optional=["k"])["dims"] == 8
        return
    with pytest.raises(ValueError, match=message) as error:
        read_json(path, keys=["dims"], optional=["k"])
    assert "config.json" in str(error.value)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="is not a file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


RULES = {"x": Expected(("F32",), 2), "*.ids": Expected(("I64",)), "y": Expected(("I64",), 1, False)}


def test_tensors_that_fit_are_read(tmp_path):
    tensors = {"x": np.ones((2, 3), np.float32), "0.ids": np.arange(3), "1.ids": np.arange(2)}
    save_file(tensors, tmp_path / "t", {"about": "them"})
    contents, metadata = read_safetensors(tmp_path / "t", RULES, framework="np")
    assert contents.keys() == tensors.keys()
    assert all((contents[name] == tensors[name]).all() for name in tensors)
    assert metadata == {"about": "them"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((2, 3))}, "x must be F32; got F64"),
        ({"x": np.ones(3, np.float32)}, r"x must have 2 axes; got \[3\]"),
        ({"0.ids": np.arange(3, dtype=np.uint64)}, "0.ids must be I64; got U64"),
        ({"z": np.ones(3)}, "contains 'z'; expected only"),
        ({"x": None}, "it has no x"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, message):
    tensors = {"x": np.ones((2, 3), np.float32), "0.ids": np.arange(3)} | change
    save_file({name: part for name, part in tensors.items() if part is not None}, tmp_path / "t")
    with pytest.raises(ValueError, match=message):
        read_safetensors(tmp_path / "t", RULES, framework="np")


def raw(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        raw([]),
        raw({"x": 3}),
        raw({"x": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [1, -1], "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": ["F32"], "shape": [1, 1], "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 2**62]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, b"12345678"),
        raw({"__metadata__": [], "x": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ValueError, match=r"/t "):
        read_safetensors(tmp_path / "t", {"x": Expected(("F32",), 2)}, framework="np")


def test_a_header_that_is_too_large_is_refused(tmp_path):
    save_file({"x": np.ones((1, 1), np.float32)}, tmp_path / "t", {"about": "a" * 2**23})
    with pytest.raises(ValueError, match="has a header of"):
        read_safetensors(tmp_path / "t", {"x": Expected(("F32",), 2)}, framework="np")


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(["F32", "I64", "BOOL", "F8_E4M3", "X", None, 3]),
    shape=st.lists(
        st.one_of(st.integers(-2, 4), st.sampled_from([2**31, 2**50, 2**63])), max_size=3
    ),
    offsets=st.lists(st.integers(-4, 40), max_size=3),
    data=st.binary(max_size=40),
)
def test_any_header_is_read_or_refused(tmp_path_factory, dtype, shape, offsets, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(raw({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data))
    try:
        contents, _ = read_safetensors(path, {"x": Expected(("F32",), 2)}, framework="np")
    except ValueError:
        return
    assert contents["x"].dtype == np.float32
    assert contents["x"].nbytes == len(data)


def png(width: int, height: int) -> bytes:
    """The head of a PNG, which is all that tells its size."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        sum_ = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + sum_

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * (3 * width + 1) * height) if width * height < 100 else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def encoded(kind: str, mode: str = "RGB", side: int = 24, **options: object) -> bytes:
    """A picture of one colour that is there, however large it is."""
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (side, side)).save(file, kind, **options)
    return file.getvalue()


PICTURES = [
    ("PNG", "RGB", {}), ("PNG", "RGBA", {}), ("PNG", "P", {}), ("PNG", "I;16", {}),
    ("GIF", "P", {}), ("JPEG", "RGB", {}), ("JPEG", "CMYK", {"progressive": True}),
    ("TIFF", "RGBA", {"compression": "tiff_deflate", "strip_size": 2**31 - 1}),
    ("WEBP", "RGB", {"lossless": True}), ("WEBP", "RGBA", {"lossless": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode", "options"), PICTURES)
def test_pictures_of_a_usual_kind_are_decoded(kind, mode, options):
    from PIL import ImageOps

    picture = read_picture(encoded(kind, mode, **options))
    assert picture.format == kind
    assert len(picture.convert("RGB").getcolors()) == 1
    assert ImageOps.exif_transpose(picture).size == (24, 24)


MEMORY = """
import os, resource, sys
from pathlib import Path
from ncl_multi.data.folders import on_white
from ncl_multi.files import most_memory, read_picture

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

for folder in sorted(Path(sys.argv[1]).iterdir()):
    if not os.fork():
        on_white(read_picture(folder / "small"))
        before = peak()
        on_white(read_picture(folder / "large"))
        size = (folder / "large").stat().st_size
        print(folder.name, peak() - before - most_memory(size), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory otherwise")
def test_the_largest_picture_of_a_small_file_takes_little_memory(tmp_path):
    from PIL import Image

    for number, (kind, mode, options) in enumerate(PICTURES):
        folder = tmp_path / f"{number} {kind} {mode}"
        folder.mkdir()
        (folder / "small").write_bytes(encoded(kind, mode, **options))
        with Image.open(folder / "small") as picture:
            side = math.isqrt(most_memory(0) // _bytes_per_pixel(picture))
        (folder / "large").write_bytes(encoded(kind, mode, side, **options))
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = done.stdout.splitlines()
    assert len(rows) == len(PICTURES)
    assert all(int(row.split()[-1]) < 2**23 for row in rows), rows


def test_a_picture_of_many_pixels_needs_as_many_bytes():
    def padded(side: int) -> bytes:
        return encoded("PNG", side=side) + bytes(2**24)

    assert read_picture(padded(5_100)).size == (5_100, 5_100)
    with pytest.raises(ValueError, match="pixels in 4000 bytes; at most 25010000 are"):
        read_picture(encoded("PNG", side=5_100)[:4000])
    for side in (2**13 + 1, 100_000):
        with pytest.raises(ValueError, match="the file cannot be read as a picture"):
            read_picture(png(side, side) + bytes(2**26))


def test_a_transparent_picture_is_laid_on_white_in_strips_as_in_one(monkeypatch):
    from PIL import Image

    from ncl_multi.data import folders

    noise = [Image.effect_noise((70, 50), 90) for _ in range(4)]
    whole = Image.merge("RGBA", noise)
    palette = noise[0].convert("P")
    palette.info["transparency"] = bytes(range(256))
    for picture in (whole, whole.convert("LA"), palette):
        once = folders.on_white(picture)
        rgba = picture.convert("RGBA")
        by_hand = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
        assert once.tobytes() == by_hand.convert("RGB").tobytes()
        with monkeypatch.context() as patch:
            patch.setattr(folders, "_STRIP", 300)
            assert folders.on_white(picture).tobytes() == once.tobytes()


def damaged(kind: str) -> bytes:
    """A small PNG, or PPM, with other bytes than it says."""
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((24, 24), 50).save(file, "PNG")
    whole = file.getvalue()
    length = whole.index(b"IDAT") - 4
    return {
        "cut": whole[:200],
        "a part that is shorter than it says": whole[:length] + b"\0\0\0\x10" + whole[length + 4 :],
        "letters in the place of numbers": b"P3 1 1 255 a b c",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("cut", OSError),
        ("a part that is shorter than it says", SyntaxError),
        ("letters in the place of numbers", ValueError),
    ],
)
def test_a_picture_whose_pixels_are_damaged_is_refused_by_name(kind, error):
    from PIL import Image

    opened = Image.open(io.BytesIO(damaged(kind)))
    with pytest.raises(error):
        opened.load()
    with pytest.raises(ValueError, match=r"b\.png cannot be read as a picture"):
        read_picture(damaged(kind), "b.png")


def test_what_is_no_picture_is_said_to_be_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_picture(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    for path in (tmp_path, tmp_path / "b.png"):
        with pytest.raises(ValueError, match="is not a file"):
            read_picture(path)
    with pytest.raises(ValueError, match="thumbnail 3 is not a picture"):
        read_picture(b"<svg/>", "thumbnail 3")


def test_a_picture_that_would_start_a_program_is_refused():
    from PIL import Image

    content = encoded("EPS")
    assert Image.open(io.BytesIO(content)).format == "EPS", "Pillow would give it to Ghostscript"
    with pytest.raises(ValueError, match="is not a picture"):
        read_picture(content)


def test_equal_files_share_their_place_and_others_stay(tmp_path):
    for name, content in (("a", b"1"), ("deep/b", b"1"), ("c", b"2"), ("small", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content * 2**20)
    assert link_equal_files(tmp_path) == 2**20
    assert (tmp_path / "a").samefile(tmp_path / "deep" / "b")
    assert not (tmp_path / "a").samefile(tmp_path / "c")
    assert link_equal_files(tmp_path) == 0
    with atomic(tmp_path / "a") as unfinished:
        unfinished.write_bytes(b"3")
    assert (tmp_path / "deep" / "b").read_bytes() == b"1" * 2**20


def test_what_killed_processes_left_of_a_file_is_removed(tmp_path):
    with atomic(tmp_path / "a") as unfinished:
        unfinished.write_text("1")
        mine = unfinished.name
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = [mine.replace(str(os.getpid()), str(pid)) for pid in (ended.pid, os.getppid())]
    for name in left:
        (tmp_path / name).write_text("half")
    with atomic(tmp_path / "a") as unfinished:
        unfinished.write_text("2")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a", left[1]])
