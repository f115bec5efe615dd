"""The atlas: what goes into the page, then the page itself in a real browser."""

import base64
import gzip
import io
import json
import re
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("tqdm")
Image = pytest.importorskip("PIL.Image")

from browser import CHROMIUM, Browser  # noqa: E402

from ncl_multi import Features, metrics  # noqa: E402
from ncl_multi.atlas import page as atlas  # noqa: E402
from ncl_multi.atlas.page import write_atlas  # noqa: E402

WORDS = ["dog", "ship", "frog", "car", "bird"]
TRAP = "<script>window.trapped = 1</script><img src=x onerror='window.trapped = 1'></script> & dog"


def picture(colour, size=64):
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(buffer, "PNG")
    return buffer.getvalue()


def example(n=60, dims=30, *, text=True, pictures=True, seed=0, **about):
    """Class c fires dimensions c, c + 5, c + 10 ...; the last two dimensions are dead."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 5
    z = torch.rand(n, dims, generator=generator) * (torch.arange(dims) % 5 == y[:, None])
    z[:, -2:] = 0
    return Features(
        z,
        y=y,
        items=[f"a {WORDS[c]} number {row}" for row, c in enumerate(y)] if text else None,
        thumbnails=[picture((50 * int(c), 100, 200)) for c in y] if pictures else None,
        about={"activation": "relu", "output": "head", "split": "test", "classes": WORDS} | about,
    )


def signed(features, seed=1):
    z = torch.randn(len(features), features.dims, generator=torch.Generator().manual_seed(seed))
    about = features.about | {"activation": "none"}
    return Features(z, features.y, features.items, about, features.thumbnails)


def read(page: Path):
    """The data of a page, as its script reads it, and its pictures."""
    content = page.read_text(encoding="utf-8")
    data = re.search(r'id="data">([^<]*)<', content)[1]
    pictures = re.search(r'id="pictures">([^<]*)<', content)[1]
    raw = gzip.decompress(base64.b64decode(data))
    (length,) = struct.unpack("<I", raw[:4])
    about = json.loads(raw[4 : 4 + length])
    for name, (kind, offset, count) in about["arrays"].items():
        array = np.frombuffer(raw, f"<{kind}", count, about["start"] + offset)
        owner, _, field = name.rpartition(".")
        (about["spaces"][int(owner)] if owner else about)[field] = array
    return about, pictures


def test_cards_show_the_strongest_items_of_each_dimension(tmp_path):
    features = example()
    features.save(tmp_path / "features" / "test.safetensors")
    about, _ = read(write_atlas(tmp_path))
    (space,) = about["spaces"]
    z = F.normalize(features.z, dim=1)
    top = space["topItems"].reshape(30, 12)
    for dim in range(28):
        assert top[dim].tolist() == z[:, dim].argsort(descending=True)[:12].tolist()
    assert (top[28:] == 65535).all()
    assert space["fires"] == pytest.approx((z > 1e-5).float().mean(dim=0).numpy())
    assert space["mean"] == pytest.approx(z.mean(dim=0).numpy())
    assert space["names"][:6] == ["dog", "ship", "frog", "car", "bird", "dog"]
    classes = space["classIds"].reshape(30, 3)
    assert classes[:5, 0].tolist() == [0, 1, 2, 3, 4]
    assert (classes[:28, 1] == 65535).all()
    facts = dict(space["facts"])
    assert facts["alive"] == "93%"
    assert facts["class consistency"] == "1.00"


def test_dimensions_carry_their_measures(tmp_path):
    features = example()
    # Dimension 0 fires for anything, dimension 6 repeats dimension 1.
    features.z[:, 0] = torch.linspace(1, 2, 60)[torch.arange(60) * 7 % 60]
    features.z[:, 6] = features.z[:, 1] * 1.01
    features.save(tmp_path / "features" / "test.safetensors")
    about, _ = read(write_atlas(tmp_path))
    (space,) = about["spaces"]
    assert space["purity"] == pytest.approx(
        metrics.dimension_purity(features.z, features.y), nan_ok=True
    )
    assert space["fit"][1:28] == pytest.approx(np.ones(27))
    assert space["names"][0] == "mixed"
    assert np.isnan(space["fit"][0])
    assert space["score"][0] == pytest.approx(space["purity"][0] / 2)
    assert space["score"][1:28] == pytest.approx(np.ones(27))
    assert (space["score"][28:] == -1).all()
    assert space["commonClass"][1:6].tolist() == [1, 2, 3, 4, 0]
    assert space["leader"][[1, 6]].tolist() == [1, 1]
    assert space["leader"][2] == 2
    facts = dict(space["facts"])
    assert facts["purity@10"].startswith(f"{metrics.purity(features.z, features.y):.2f} (chance")
    assert facts["distinct"] == f"{metrics.distinct(features.z):.2f}"
    assert facts["named"] == "96%"
    assert facts["name fits"] == "100%"


def test_what_a_page_cannot_measure_it_leaves_out(tmp_path):
    z = torch.rand(30, 6, generator=torch.Generator().manual_seed(0))
    Features(z, y=torch.rand(30)).save(tmp_path / "features" / "test.safetensors")
    about, _ = read(write_atlas(tmp_path))
    (space,) = about["spaces"]
    assert np.isnan(space["purity"]).all()
    assert np.isnan(space["fit"]).all()
    assert (space["score"] == -1).all()
    assert "purity@10" not in dict(space["facts"])
    assert "distinct" in dict(space["facts"])


def test_a_twin_may_be_another_run(tmp_path):
    example().save(tmp_path / "a" / "features" / "test.safetensors")
    signed(example()).save(tmp_path / "b" / "features" / "test.safetensors")
    about, _ = read(write_atlas(tmp_path / "a", tmp_path / "b"))
    assert [space["title"] for space in about["spaces"]] == ["NCL", "Twin"]
    with pytest.raises(FileNotFoundError, match="no features file at"):
        write_atlas(tmp_path / "a", tmp_path / "c")
    other = example()
    other.items[0] = "something else"
    other.save(tmp_path / "c" / "features" / "test.safetensors")
    with pytest.raises(ValueError, match="got other items"):
        write_atlas(tmp_path / "a", tmp_path / "c")


def test_nearest_items_are_the_nearest_and_their_parts_sum_to_the_score(tmp_path):
    features = example(dims=20)
    features.save(tmp_path / "features" / "test.safetensors")
    about, _ = read(write_atlas(tmp_path))
    (space,) = about["spaces"]
    z = F.normalize(features.z, dim=1)
    similarity = (z @ z.T).fill_diagonal_(0)
    near = space["near"].reshape(60, 6)
    scores = space["scores"].reshape(60, 6) / 32767
    assert scores == pytest.approx(similarity.topk(6, dim=1).values.numpy(), abs=1e-4)
    assert np.take_along_axis(similarity.numpy(), near.astype(int), 1) == pytest.approx(
        scores, abs=1e-4
    )
    # At most four dimensions of a class are alive here, so four reasons are all of them.
    shares = space["reasonShares"].reshape(60, 6, 4) / 32767
    assert shares.sum(axis=2) == pytest.approx(scores, abs=2e-4)
    dims = space["reasonDims"].reshape(60, 6, 4)
    for item, rank in [(0, 0), (7, 3), (59, 5)]:
        parts = (z[item] * z[int(near[item, rank])]).numpy()
        for dim, share in zip(dims[item, rank], shares[item, rank], strict=True):
            assert dim == 65535 or share == pytest.approx(parts[dim], abs=1e-4)


def test_the_sides_of_clip_are_shown_together_and_named_by_its_texts(tmp_path):
    images = example(40, text=False, side="image")
    texts = example(40, pictures=False, seed=1, side="text")
    images.save(tmp_path / "features" / "image.safetensors")
    texts.save(tmp_path / "features" / "text.safetensors")
    about, _ = read(write_atlas(tmp_path))
    (space,) = about["spaces"]
    assert about["sides"] == ["image", "text"]
    assert len(about["items"]) == 80
    assert about["items"][0] == "image 0"
    top = space["topItems"].reshape(30, 24)[:28]
    assert (top[:, :8] < 40).all()
    assert ((top[:, 12:20] >= 40) & (top[:, 12:20] < 80)).all()
    assert space["names"][0] == "dog"
    near = space["near"].reshape(80, 8)
    assert (near[:, :4] < 40).all()
    assert (near[:, 4:] >= 40).all()


def test_the_encoders_features_and_other_splits_are_left_out(tmp_path):
    example(50).save(tmp_path / "features" / "a_train.safetensors")
    example(30, split="train").save(tmp_path / "features" / "b_train.safetensors")
    example(40, dims=9, output="encoder").save(tmp_path / "features" / "encoder.safetensors")
    about, _ = read(write_atlas(tmp_path))
    assert len(about["items"]) == 50


def test_a_run_may_bring_names_of_its_own(tmp_path):
    names = [f"{WORDS[n % 5]} {n}" for n in range(30)]
    example(names=names).save(tmp_path / "features" / "test.safetensors")
    about, _ = read(write_atlas(tmp_path))
    assert about["spaces"][0]["names"] == names


def test_many_items_are_thinned_out_and_pictures_kept_within_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(atlas, "MOST_ITEMS", 50)
    noise = np.random.default_rng(0).integers(0, 256, (120, 96, 96, 3), dtype=np.uint8)
    files = []
    for pixels in noise:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        files.append(buffer.getvalue())
    whole = example(120, pictures=False)
    features = Features(whole.z, whole.y, whole.items, whole.about, files)
    features.save(tmp_path / "features" / "test.safetensors")
    about, pictures = read(write_atlas(tmp_path))
    assert len(about["items"]) == 50
    assert "50 items of 120" in about["about"]
    assert all(np.diff(about["ends"]) > 0)
    monkeypatch.setattr(atlas, "LARGEST", 60_000)
    page = write_atlas(tmp_path)
    about, shown_rows = read(page)
    assert 0 < len(shown_rows) < len(pictures)
    shown = np.flatnonzero(np.diff(about["ends"]))
    first = about["spaces"][0]["topItems"].reshape(30, 12)[:28, 0]
    assert set(first) <= set(shown) or len(shown) < len(set(first))
    start, end = about["ends"][shown[0]], about["ends"][shown[0] + 1]
    assert Image.open(io.BytesIO(base64.b64decode(shown_rows[start:end]))).format == "WEBP"


def subgraph(**parts):
    """Three nodes, the first two linked; the third has no label."""
    whole = {"nodes": [4, 0, 9], "classes": [2, 2, -1], "x": [0, 100, 50], "y": [0, 0, 100]}
    return whole | {"links": [[0, 1]]} | parts


def test_a_graph_is_drawn_from_numbers_only(tmp_path):
    silent = {"nodes": [], "classes": [], "x": [], "y": [], "links": []}
    example(dims=2, drawings=[subgraph(), silent]).save(tmp_path / "features/test.safetensors")
    drawn, nothing = read(write_atlas(tmp_path))[0]["spaces"][0]["drawings"]
    assert nothing == ""
    assert drawn.count("<circle") == 3
    assert re.findall("<line [^/]*", drawn) == [
        '<line x1="10" y1="10" x2="110" y2="10" stroke="#999"'
    ]
    assert re.findall(r">(\d+)</text>", drawn) == ["1", "2", "3"]
    colours = re.findall('r="6" fill="([^"]*)"', drawn)
    assert colours[0] == colours[1] != colours[2]
    trap = [subgraph(x=[TRAP, 1, 2]), silent]
    example(dims=2, drawings=trap).save(tmp_path / "features/test.safetensors")
    with pytest.raises(ValueError, match="invalid literal"):
        write_atlas(tmp_path)


def test_a_picture_that_does_not_decode_becomes_text(tmp_path):
    whole = example(10, pictures=False)
    files = [b"no picture"] * 10
    features = Features(whole.z, whole.y, whole.items, whole.about, files)
    features.save(tmp_path / "features" / "test.safetensors")
    assert read(write_atlas(tmp_path))[1] == ""


def test_text_cannot_leave_the_data(tmp_path):
    run = tmp_path / "<script>alert(1)</script>".replace("/", "-")
    features = example(10)
    features.items[0] = TRAP
    features.save(run / "features" / "test.safetensors")
    content = write_atlas(run).read_text(encoding="utf-8")
    assert content.count("<script") == 3
    assert "alert(1)" in content
    assert "<script>alert" not in content
    assert "trapped" not in content


def test_what_cannot_be_shown_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no features of a head in"):
        write_atlas(tmp_path)
    example().save(tmp_path / "features" / "test.safetensors")
    signed(example(20)).save(tmp_path / "twin" / "features" / "test.safetensors")
    with pytest.raises(ValueError, match="must contain the items of this run, 60; got 20"):
        write_atlas(tmp_path)
    example(side="image").save(tmp_path / "two" / "features" / "image.safetensors")
    example(dims=9, side="text").save(tmp_path / "two" / "features" / "text.safetensors")
    with pytest.raises(ValueError, match="same width; got"):
        write_atlas(tmp_path / "two")


@pytest.mark.parametrize("dims", [1, 2])
def test_the_smallest_run_has_a_page(tmp_path, dims):
    Features(torch.ones(1, dims)).save(tmp_path / "features" / "test.safetensors")
    about, _ = read(write_atlas(tmp_path))
    assert about["items"] == ["item 0"]
    assert about["classes"] is None


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    features = example(200, 80)
    features.items[0] = TRAP
    features.z[0, 0] = 9
    features.save(run / "features" / "test.safetensors")
    signed(features).save(run / "twin" / "features" / "test.safetensors")
    return write_atlas(run)


CARDS = "[...document.querySelectorAll('.card')]"
FIRST = "document.querySelector('.card .name').textContent"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_in_a_browser(browser, page, tmp_path, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.run(f"{CARDS}.length") >= 48
    browser.until("document.querySelector('.picture img').complete")
    # Nothing is wider than the window, and no text is smaller than one can read.
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    shot = Image.open(io.BytesIO(browser.screenshot(tmp_path / "page.png"))).convert("L")
    assert shot.width == width
    assert (np.asarray(shot).mean() < 100) == dark
    assert len(np.unique(shot)) > 20
    assert browser.faults() == []


def test_search_filters_and_sorting_sorts(browser, page):
    browser.open(page)
    browser.run("query.value = 'SHIP'; query.dispatchEvent(new Event('input'))")
    browser.until("document.getElementById('status').textContent.startsWith('16 of 80')")
    assert browser.run(f"{CARDS}.every(card => card.textContent.includes('ship'))")
    assert browser.run("document.querySelectorAll('#found .chip').length") == 8
    browser.run("query.value = '#17'; query.dispatchEvent(new Event('input'))")
    browser.until(f"{CARDS}.length === 1")
    assert browser.run(f"{CARDS}[0].dataset.dimension") == "17"
    browser.run("query.value = 'nowhere'; query.dispatchEvent(new Event('input'))")
    browser.until(f"{CARDS}.length === 0")
    browser.run("query.value = ''; query.dispatchEvent(new Event('input'))")
    browser.run("sort.value = 'dead'; sort.dispatchEvent(new Event('change'))")
    browser.until(f"{CARDS}.length >= 48")
    assert browser.run(f"{CARDS}.slice(0, 3).map(card => card.dataset.dimension)")[:2] == [
        "78",
        "79",
    ]
    assert browser.run("document.querySelectorAll('.card.dead').length") == 2
    browser.run("sort.value = 'number'; sort.dispatchEvent(new Event('change'))")
    assert browser.run(f"{CARDS}.slice(0, 3).map(card => card.dataset.dimension)") == [
        "0",
        "1",
        "2",
    ]
    assert browser.faults() == []


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Dimension 0 fires for anything, dimension 6 repeats dimension 1, two never fire."""
    run = tmp_path_factory.mktemp("uneven")
    features = example(300, 20)
    features.z[:, 0] = torch.linspace(1, 2, 300)[torch.arange(300) * 7 % 300]
    features.z[:, 6] = features.z[:, 1] * 0.99
    features.save(run / "features" / "test.safetensors")
    signed(features).save(run / "twin" / "features" / "test.safetensors")
    return write_atlas(run)


def test_the_most_readable_come_first_and_the_mixed_last(browser, uneven):
    browser.open(uneven)
    shown = browser.run(f"{CARDS}.map(card => Number(card.dataset.dimension))")
    assert len(shown) == 19
    assert 6 not in shown
    assert shown[-3:] == [0, 18, 19]
    kinds = browser.run(f"{CARDS}.map(card => card.classList[2] ?? 'named')")
    assert kinds == ["named"] * 16 + ["mixed"] + ["dead"] * 2
    assert "1 mixed" in browser.run("document.querySelector('.divider').textContent")
    assert "1 near-duplicate is" in browser.run("document.getElementById('status').textContent")
    assert browser.run("document.querySelector('.card.mixed .badge').textContent")
    assert browser.faults() == []


def test_a_near_duplicate_is_on_the_card_it_repeats(browser, uneven):
    browser.open(uneven)
    browser.run("document.querySelector('[data-dimension=\"1\"] .repeats button').click()")
    inside = browser.run("document.getElementById('inside').textContent")
    assert "dimension 6" in inside
    assert "A near-duplicate of #1" in inside
    browser.run("document.getElementById('close').click()")
    browser.run("sort.value = 'number'; sort.dispatchEvent(new Event('change'))")
    assert browser.run(f"{CARDS}.length") == 20
    assert browser.faults() == []


def test_measures_are_told_for_the_run_and_its_twin(browser, uneven):
    browser.open(uneven)
    cells = (
        "[...document.querySelectorAll('#facts tbody tr')].map(row => row.children[1].textContent)"
    )
    ours, twin = (float(cell.split()[0]) for cell in browser.run(cells))
    assert ours > 0.9 > twin
    heads = "[...document.querySelectorAll('#facts thead th')].slice(1)"
    assert browser.run(f"{heads}.every(head => head.title.length > 10)")
    fits = browser.run("document.querySelector('.card .meters').textContent")
    assert "100 %" in fits
    assert "fit the name" in fits
    browser.run("document.querySelector('[data-dimension=\"2\"] .title').click()")
    inside = browser.run("document.getElementById('inside').textContent")
    assert "fit the name" in inside
    assert "null" not in inside


def test_scrolling_brings_every_card(browser, page):
    browser.open(page)
    for _ in range(6):
        browser.run("window.scrollTo(0, document.body.scrollHeight)")
        time.sleep(0.1)
    browser.until(f"{CARDS}.length === 80")
    assert browser.run("document.getElementById('more').hidden")


def test_a_click_on_an_item_explains_it(browser, page):
    browser.open(page)
    browser.run("document.querySelector('.picture').click()")
    assert browser.run("document.getElementById('detail').open")
    score = float(browser.run("document.querySelector('.match .score').textContent"))
    parts = "[...document.querySelector('.match .reason').querySelectorAll('b')]"
    reasons = browser.run(f"{parts}.map(part => Number(part.textContent))")
    assert sum(reasons) == pytest.approx(score, abs=0.04)
    browser.run("document.querySelector('.row').click()")
    assert "fires for" in browser.run("document.getElementById('inside').textContent")
    browser.run("document.getElementById('back').click()")
    assert browser.run("document.querySelectorAll('.match').length") == 6
    browser.run("document.querySelectorAll('#side button')[1].click()")
    assert browser.run("document.getElementById('inside').className") == "inside twin"
    browser.run("document.getElementById('close').click()")
    assert not browser.run("document.getElementById('detail').open")
    assert browser.faults() == []


def test_ncl_and_twin_stand_side_by_side(browser, page):
    browser.open(page)
    browser.run("document.querySelectorAll('#view button')[2].click()")
    kinds = browser.run(f"{CARDS}.slice(0, 4).map(card => card.classList[1])")
    assert kinds == ["ours", "twin", "ours", "twin"]
    columns = "[...document.querySelectorAll('.column')].map(column => column.textContent)"
    assert browser.run(columns) == ["NCL", "Twin"]
    browser.run("document.querySelectorAll('#view button')[1].click()")
    assert browser.run(f"{CARDS}.every(card => card.classList.contains('twin'))")
    assert browser.faults() == []


def test_a_caption_with_a_script_shows_as_text(browser, page):
    browser.open(page)
    browser.run("query.value = 'trapped'; query.dispatchEvent(new Event('input'))")
    browser.until("document.querySelectorAll('#found .chip').length === 1")
    browser.run("document.querySelector('#found .chip').click()")
    assert browser.run("document.getElementById('subject').textContent") == TRAP
    assert browser.run("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.run("window.trapped") is None
    assert browser.faults() == []


def test_a_graphs_subgraph_is_on_its_card(browser, tmp_path):
    features = example(30, 3, pictures=False, drawings=[subgraph()] * 3)
    features.save(tmp_path / "features" / "test.safetensors")
    browser.open(write_atlas(tmp_path))
    drawn = "document.querySelector('.card .drawing')"
    browser.until(f"{drawn}.complete && {drawn}.naturalWidth > 0")
    assert browser.run("document.getElementById('drawn').hidden") is False, "it is explained"
    browser.run("document.querySelector('.card .title').click()")
    browser.until("document.querySelector('#inside .drawing') !== null")
    assert browser.faults() == []


def test_the_keyboard_is_enough(browser, page):
    browser.open(page)
    browser.press("/", "/")
    assert browser.run("document.activeElement.id") == "query"
    assert browser.run("query.value") == ""
    browser.run("document.querySelector('.card .title').focus()")
    browser.press("ArrowRight")
    second = browser.run("document.activeElement.closest('.card').dataset.dimension")
    assert second == browser.run(f"{CARDS}[1].dataset.dimension")
    browser.press("Enter")
    assert browser.run("document.getElementById('detail').open")
    for _ in range(2):
        browser.press("Tab")
    assert browser.run("document.activeElement.className") == "picture"
    browser.press("Enter")
    assert browser.run("document.querySelectorAll('.match').length") == 6
    browser.press("Escape")
    assert not browser.run("document.getElementById('detail').open")
    assert browser.faults() == []


def test_a_page_of_texts_without_classes_or_twin_opens(browser, tmp_path):
    whole = example(pictures=False)
    about = {"activation": "relu", "output": "head"}
    Features(whole.z, items=whole.items, about=about).save(tmp_path / "features" / "x.safetensors")
    browser.open(write_atlas(tmp_path))
    assert browser.run("document.getElementById('view').hidden")
    assert browser.run("document.querySelector('#sort [value=consistency]')") is None
    browser.run("document.querySelector('.lines button').click()")
    assert browser.run("document.querySelectorAll('.match.plain').length") == 6
    assert browser.faults() == []


def test_a_page_of_16384_dimensions_opens_and_finds(browser, tmp_path):
    generator = torch.Generator().manual_seed(0)
    features = example(400, 16_384, pictures=False)
    drawn = torch.randint(16_384, (400, 60), generator=generator)
    z = torch.zeros(400, 16_384).scatter_(1, drawn, torch.rand(400, 60, generator=generator))
    replace(features, z=z).save(tmp_path / "features" / "test.safetensors")
    browser.open(write_atlas(tmp_path))
    assert browser.run("document.getElementById('status').textContent").startswith("16,3")
    assert browser.run(f"{CARDS}.length") < 200
    started = time.monotonic()
    browser.run("query.value = '#16000'; query.dispatchEvent(new Event('input'))")
    browser.until(f"{CARDS}.length === 1 && {CARDS}[0].dataset.dimension === '16000'")
    assert time.monotonic() - started < 5
    assert browser.faults() == []


def test_a_name_that_fits_few_of_the_items_is_a_guess(browser, tmp_path):
    names = ["dog", "ship", "zebra", "car", "bird", "zebra", *["dog"] * 24]
    features = example(names=names)
    # Dimension 2 fires for anything; 5 only for dogs, which is what it is then called.
    features.z[:, 2] = torch.linspace(1, 2, 60)[torch.arange(60) * 7 % 60]
    features.save(tmp_path / "features" / "test.safetensors")
    path = write_atlas(tmp_path)
    assert read(path)[0]["spaces"][0]["names"][5] == "dog: zebra"
    browser.open(path)
    card = "document.querySelector('[data-dimension=\"2\"]')"
    assert browser.run(f"{card}.classList.contains('mixed')")
    assert browser.run(f"{card}.querySelector('.guess').textContent") == "zebra?"
    assert browser.run("document.querySelector('[data-dimension=\"1\"] .guess')") is None
