"""The app: the desk behind it on a small run, then the page itself over the wire."""

import io
import json
import os
import socket
import subprocess
import sys
import time
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("tqdm")

from ncl_multi import Features  # noqa: E402
from ncl_multi.app import Desk, load_model  # noqa: E402

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


def test_bad_questions_are_told(run):
    desk = Desk(run)
    with pytest.raises(ValueError, match=r"numbered 0..35; got 36"):
        desk.code(item=36)
    with pytest.raises(ValueError, match="type some words"):
        desk.code("  ")
    with pytest.raises(ValueError, match="no model that can encode"):
        desk.code("a dog")
    code = desk.code(item=0)
    with pytest.raises(ValueError, match="nothing is left of the question"):
        desk.find(code, drop=desk.concepts(code))


def test_words_are_encoded_by_the_runs_own_model(run):
    pytest.importorskip("transformers")
    from test_wrap import tiny_bert, tiny_tokenizer

    import ncl_multi as ncl

    model = ncl.wrap(tiny_bert(), dims=4, processor=tiny_tokenizer())
    model.save_pretrained(run / "model")
    assert type(load_model(run / "model")) is type(model)
    code = Desk(run).code("the cat sat")
    assert code.toarray() == pytest.approx(model.encode(["the cat sat"]).toarray(), abs=1e-6)
    assert np.linalg.norm(code.toarray()) == pytest.approx(1)


def test_a_model_that_takes_no_questions_is_left_alone(run):
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text('{"in_dim": 8}')
    assert Desk(run).model is None


def call(url, name, *arguments):
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
    assert kind == "event: complete"
    return json.loads(data.removeprefix("data: "))


@pytest.fixture
def url(run):
    """The app as its user starts it."""
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
    command = [sys.executable, "-m", "ncl_multi.app", str(run)]
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
