"""The app: the desk behind it on a small run, then the page itself over the wire."""

import base64
import io
import json
import os
import socket
import struct
import subprocess
import sys
import time
import zlib
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

pytest.importorskip("numba")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("tqdm")

from ncl_multi import Features  # noqa: E402
from ncl_multi.app import MOST_SIDE, MOST_UPLOAD, Desk, load_model, read_upload  # noqa: E402

WORDS = ["dog", "beach", "snow", "ship"]
TRAP = "<script>alert(1)</script> dog beach"


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def run(tmp_path):
    """Every pair of words is an item of each side; dimension n fires for word n."""
    pairs = [(a, b) for a in range(4) for b in range(a)] * 3
    z = torch.zeros(len(pairs), 4)
    for row, (a, b) in enumerate(pairs):
        z[row, a], z[row, b] = 1.0, 1.0 + row / 100
    texts = [f"{WORDS[a]} {WORDS[b]} {row}" for row, (a, b) in enumerate(pairs)]
    texts[0] = TRAP
    about = {"output": "head", "split": "test"}
    Features(z, items=texts, about=about | {"side": "text"}).save(
        tmp_path / "features" / "text.safetensors"
    )
    pictures = [png((60 * a, 60 * b, 9)) for a, b in pairs]
    Features(z, about=about | {"side": "image"}, thumbnails=pictures).save(
        tmp_path / "features" / "image.safetensors"
    )
    return tmp_path


def test_an_item_finds_itself_and_the_parts_sum(run):
    desk = Desk(run)
    assert desk.names == WORDS
    assert len(desk.items) == 36
    assert desk.sides == ["image", "text"]
    matches = desk.find(desk.code(item=5))
    assert matches[0].score == pytest.approx(1, abs=1e-6)
    for match in matches:
        assert sum(part.share for part in match.parts) == pytest.approx(match.score, abs=1e-6)


def test_concepts_are_switched_off_and_on(run):
    desk = Desk(run)
    code = desk.code(item=0)
    first, second = desk.concepts(code)
    assert {desk.label(first), desk.label(second)} == {"#0 dog", "#1 beach"}
    without = desk.find(code, drop=[1], k=30)
    assert all(part.dimension == 0 for match in without for part in match.parts)
    with_snow = desk.find(code, drop=[1], boost={2: 1.0}, k=1)
    assert {part.name for part in with_snow[0].parts} == {"dog", "snow"}
    assert all(desk.items[match.id].side == "text" for match in desk.find(code, side="text"))


def test_results_are_escaped_and_pictures_carried_along(run):
    desk = Desk(run)
    page = desk.page(desk.find(desk.code(item=0), k=36))
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "data:image/png;base64," in page
    assert desk.page([]) == "<p>No item shares a concept with this.</p>"


def test_a_question_that_no_item_answers_finds_nothing(run):
    for path in (run / "features").iterdir():
        path.unlink()
    about = {"output": "head", "split": "test", "side": "text"}
    features = Features(torch.eye(5)[:4], items=WORDS, about=about)
    features.save(run / "features" / "text.safetensors")
    desk = Desk(run)
    assert len(desk.find(csr_array(np.eye(5)[[3]]))) == 1
    assert desk.find(csr_array(np.eye(5)[[4]])) == []


def test_bad_questions_are_told(run):
    desk = Desk(run)
    with pytest.raises(ValueError, match=r"numbered 0..35; got 36"):
        desk.code(item=36)
    with pytest.raises(ValueError, match="type words"):
        desk.code("  ")
    with pytest.raises(ValueError, match="no model that can encode"):
        desk.code("a dog")
    code = desk.code(item=0)
    with pytest.raises(ValueError, match="the query is empty: keep at least one"):
        desk.find(code, drop=desk.concepts(code))


def test_words_are_encoded_by_the_runs_own_model(run):
    pytest.importorskip("transformers")
    from tiny_text import tiny_bert, tiny_tokenizer

    import ncl_multi as ncl

    model = ncl.wrap(tiny_bert(), dims=4, processor=tiny_tokenizer())
    model.save_pretrained(run / "model")
    assert type(load_model(run / "model")) is type(model)
    # The browser sends 0 as the item if no number was typed.
    code = Desk(run).code("the cat sat", item=0)
    assert code.toarray() == pytest.approx(model.encode(["the cat sat"]).toarray(), abs=1e-6)
    assert np.linalg.norm(code.toarray()) == pytest.approx(1)


def test_words_are_no_paths_for_models_of_pictures(run):
    ncl = pytest.importorskip("ncl_multi.adapters.vision.model")
    private = run / "private.png"
    private.write_bytes(png((1, 2, 3)))
    model = ncl.NonNegVision("test_resnet", 4, hidden_dim=None)
    model.save_pretrained(run / "model")
    desk = Desk(run)
    # The model itself takes paths, of its caller.
    with Image.open(private) as picture:
        assert (desk.model.encode([str(private)]) != desk.model.encode([picture])).nnz == 0
    with pytest.raises(ValueError, match="encodes pictures, not words; drop a picture"):
        desk.code(str(private))


def test_a_class_list_that_is_too_short_and_thumbnails_that_are_no_pictures_are_shown_as_such(run):
    z = torch.eye(4).repeat(3, 1)
    bytes_ = [png((1, 2, 3)), b"<script>alert(1)</script>", *[png((1, 2, 3))] * 10]
    features = run / "features"
    for path in features.iterdir():
        path.unlink()
    about = {"output": "head", "split": "test", "classes": ["cat", "dog"]}
    y = torch.tensor([0, 1, 2, -1] * 3)
    Features(z, y=y, about=about, thumbnails=bytes_).save(features / "image.safetensors")
    desk = Desk(run)
    assert [item.text for item in desk.items[:4]] == ["cat", "dog", "class 2", "class -1"]
    page = desk.page(desk.find(desk.code(item=1), k=3))
    assert "the thumbnail is not a picture" in page
    assert page.count("<img") == 2
    assert "<script" not in page


def test_names_that_are_no_texts_are_refused(run):
    path = run / "features" / "text.safetensors"
    texts = Features.load(path)
    for names in ("abcd", [1, 2, 3, 4], {"a": 1}):
        Features(texts.z, items=texts.items, about=texts.about | {"names": names}).save(path)
        with pytest.raises(ValueError, match="must be a list of 4 texts"):
            Desk(run)


def test_a_model_that_takes_no_questions_is_left_alone(run):
    pytest.importorskip("torch_geometric")
    from ncl_multi.adapters.graph.model import NonNegGraph

    NonNegGraph(4, in_dim=8).save_pretrained(run / "model")
    assert Desk(run).model is None


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_an_upload_is_upright_and_not_larger_than_models_need(tmp_path, kind):
    turned = Image.Exif()
    turned[274] = 6
    picture = Image.new("RGB", (40, 30), "red")
    picture.paste("blue", (0, 0, 40, 15))
    picture.save(tmp_path / kind, kind, exif=turned)
    upright = read_upload(tmp_path / kind)
    assert (upright.size, upright.mode) == ((30, 40), "RGB")
    assert upright.getpixel((25, 20))[2] > 200, "the top is on the right"
    if kind != "JPEG":
        Image.new("RGBA", (40, 30), (255, 0, 0, 0)).save(tmp_path / kind, kind)
        assert read_upload(tmp_path / kind).getpixel((0, 0)) == (255, 255, 255)
    Image.new("L", (5000, 1000)).save(tmp_path / kind, kind)
    assert read_upload(tmp_path / kind).size == (MOST_SIDE, 410)


def call(url, name, *arguments, expect="complete"):
    """One call of gradio's own interface: ask, then read the event that brings the answer."""
    # One session, so that the choices one answer brings may be picked in the next question.
    body = json.dumps({"data": arguments, "session_hash": "visitor"}).encode()
    headers = {"Content-Type": "application/json"}
    for attempt in range(3):
        try:
            with urlopen(Request(f"{url}/gradio_api/call/{name}", body, headers)) as reply:
                event = json.load(reply)["event_id"]
            with urlopen(f"{url}/gradio_api/call/{name}/{event}") as reply:
                kind, data = reply.read().decode().strip().splitlines()[-2:]
        except ConnectionResetError:
            # A busy machine drops a connection now and then; an app that died refuses the next.
            if attempt == 2:
                raise
            time.sleep(1)
        else:
            break
    assert kind == f"event: {expect}"
    return json.loads(data.removeprefix("data: "))


@pytest.fixture
def url(run):
    """The app as its user starts it."""
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"GRADIO_TEMP_DIR": str(run / "uploads"), "GRADIO_ANALYTICS_ENABLED": "False"}
    command = [sys.executable, "-m", "ncl_multi.app", str(run), "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    app = subprocess.Popen(command, env=os.environ | settings, **quiet)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while time.monotonic() < end and app.poll() is None:
        try:
            with urlopen(url):
                break
        except OSError:
            time.sleep(0.3)
    yield url
    app.terminate()
    app.wait()


def test_the_app_answers(url):
    concepts, page = call(url, "ask", "", None, 0, "everything")
    assert {choice[0] for choice in concepts["choices"]} == {"#0 dog", "#1 beach"}
    assert "dog" in page
    page = call(url, "answer", "", None, 0, "text", ["#1 beach"], ["#2 snow"], 1.0)[0]
    assert "&nbsp;snow" in page
    assert "&nbsp;beach" not in page


def status(url, **headers):
    try:
        with urlopen(Request(url, headers=headers)) as reply:
            return reply.status
    except HTTPError as error:
        return error.code


def upload(url, content, name="picture.png"):
    """Post a file as a browser does; the path it was kept at, or the status of the refusal."""
    body = (
        (
            f'--cut\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n'
            f"Content-Type: image/png\r\n\r\n"
        ).encode()
        + content
        + b"\r\n--cut--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=cut"}
    try:
        with urlopen(Request(f"{url}/gradio_api/upload", body, headers)) as reply:
            return json.load(reply)[0]
    except HTTPError as error:
        return error.code


def test_pictures_are_taken_only_as_uploads_and_only_by_its_own_name(url, run, tmp_path):
    from gradio import Image as Component
    from gradio.data_classes import ImageData

    private = tmp_path / "private.png"
    private.write_bytes(png((1, 2, 3)))
    # Left to itself, the component reads what it is told to: the bomb goes off.
    assert Component(type="pil").preprocess(ImageData(path=str(private))).size == (8, 8)
    meta = {"_type": "gradio.FileData"}
    bare = base64.b64encode(private.read_bytes()).decode()
    for picture in (
        {"path": str(private)},
        {"path": str(private), "meta": meta},
        {"path": "/etc/passwd"},
        {"path": str(run / "uploads" / ".." / "private.png")},
        {"path": "http://localhost/private.png", "meta": meta},
        {"path": None, "url": f"data:image/png;base64,{bare}"},
    ):
        error = call(url, "ask", "", picture, None, "everything", expect="error")
        # Of a path with `meta` gradio itself says no, without a word.
        assert error["error"] is None or "only as uploads" in error["error"], picture
    # The run has no model, so a picture that is taken ends in these words.
    taken = upload(url, private.read_bytes())
    error = call(url, "ask", "", {"path": taken, "meta": meta}, None, "everything", expect="error")
    assert "no model that can encode" in json.dumps(error)
    error = call(url, "ask", "", {"path": taken}, None, "everything", expect="error")
    assert "no model that can encode" in json.dumps(error)
    # Each input of gradio fetches what looks like a file on the network, also that of words.
    address = {"path": "http://localhost/private.png", "meta": meta}
    for name, asked in (
        ("ask", (address, None, 0, "everything")),
        ("ask", ("", None, address, "everything")),
        ("answer", ("", None, 0, "everything", [address], [], 1.0)),
    ):
        error = call(url, name, *asked, expect="error")
        assert "not from an address" in error["error"]
    for content, words in ((b"no picture", "not a picture"), (huge_png(), "pixels")):
        taken = upload(url, content)
        asked = ("", {"path": taken, "meta": meta}, None, "everything")
        assert words in json.dumps(call(url, "ask", *asked, expect="error"))
    assert upload(url, bytes(MOST_UPLOAD + 1)) == 413
    assert status(f"{url}/gradio_api/file={taken}") == 200
    for closed in (
        "file=http://localhost/a.png", "file=%20HTTPS://a/", "proxy=http://localhost/",
        "process_recording", "run-history/buckets", "vibe-code", "monitoring",
    ):  # fmt: skip
        assert status(f"{url}/gradio_api/{closed}") == 404
    port = url.rpartition(":")[2]
    assert status(url) == status(url, Host=f"localhost:{port}") == 200
    assert status(url, Host="evil.example") == status(f"{url}/config", Host="evil.example") == 400


def huge_png():
    """100,000 x 100,000 pixels in a few bytes."""
    content = bytearray(png((0, 0, 0)))
    content[16:24] = struct.pack(">II", 100_000, 100_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)
