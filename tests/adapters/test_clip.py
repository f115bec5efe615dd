"""Non-negative CLIP: its heads, its towers from three libraries, its readers, its figures."""

import json
import tarfile
from argparse import Namespace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch.nn import functional as F

open_clip = pytest.importorskip("open_clip")
transformers = pytest.importorskip("transformers")

from PIL import Image  # noqa: E402
from small_recipes import ROOT, lay_out  # noqa: E402

from ncl_multi import StepObjective, fit, info_nce, top_k  # noqa: E402
from ncl_multi.adapters.clip.data import read_pairs  # noqa: E402
from ncl_multi.adapters.clip.heads import (  # noqa: E402
    _SQUARED_LENGTH,
    ClipHeads,
    spectral_of_cosines,
)
from ncl_multi.adapters.clip.inputs import PixelPairs, TowerFeatures, tower_features  # noqa: E402
from ncl_multi.adapters.clip.load import load_towers  # noqa: E402
from ncl_multi.adapters.clip.model import NonNegClip  # noqa: E402
from ncl_multi.adapters.clip.objective import NonNegClipLoss  # noqa: E402
from ncl_multi.adapters.clip.pairs import pairs_of  # noqa: E402
from ncl_multi.adapters.clip.report import (  # noqa: E402
    both_ways,
    describe_dimensions,
    image_share,
    names_by_captions,
    truncation_curve,
    zero_shot_accuracy,
)
from ncl_multi.adapters.clip.towers import HuggingFaceTowers, OpenClipTowers  # noqa: E402
from ncl_multi.training.fit import TrainConfig  # noqa: E402

TINY = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}


@pytest.fixture
def open_clip_towers():
    torch.manual_seed(0)
    model = open_clip.CLIP(**TINY)
    model.visual.preprocess_cfg = {**vars(open_clip.transform.PreprocessCfg(size=32))}
    return OpenClipTowers("tiny", model, TINY, open_clip.SimpleTokenizer(context_length=16))


def hugging_face_towers(folder, kind):
    """A CLIP or SigLIP of a tiny config, its tokenizer learnt on the spot."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    words = ["<pad>", "<eos>", "<unk>", "a", "square", *COLOURS]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    text = {**sizes, "vocab_size": len(words), "max_position_embeddings": 8}
    text |= {"eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
        model = transformers.CLIPModel(config)
    else:
        text["projection_size"] = 16
        model = transformers.SiglipModel(
            transformers.SiglipConfig(text_config=text, vision_config=vision)
        )
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    return HuggingFaceTowers(kind, model, tokenizer, processor)


def squares(count=24):
    """Plain squares and what to say of them; a colour's caption belongs to several images."""
    names = [list(COLOURS)[row % len(COLOURS)] for row in range(count)]
    images = [png(name, row) for row, name in enumerate(names)]
    captions = [[f"a {name} square", f"{name} {row}"] for row, name in enumerate(names)]
    y = torch.arange(count) % len(COLOURS)
    numbers = [str(row) for row in range(count)]
    return pairs_of("squares", "train", images, numbers, captions, y=y, classes=list(COLOURS))


def png(name, row=0):
    from io import BytesIO

    encoded = BytesIO()
    Image.new("RGB", (32 + row % 3, 32), COLOURS[name]).save(encoded, "PNG")
    return encoded.getvalue()


def train_two_steps(model, towers, tmp_path):
    source = PixelPairs(squares(), towers)

    def step(model, batch):
        image, text, groups = source.draw(batch)
        z_image, z_text, temperature = model(image, text)
        return info_nce(z_image, z_text, temperature=temperature, groups=groups), z_image

    loader = torch.utils.data.DataLoader(source, 8)
    cfg = TrainConfig(out=tmp_path / "run", steps=2, device="cpu")
    return fit(StepObjective(model, step), loader, cfg).model


def check_train_save_load(towers, tmp_path):
    model = NonNegClip(towers, 40, density=0.2)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    model = train_two_steps(model, towers, tmp_path)
    still = [n for n, w in model.named_parameters() if w.requires_grad and w.equal(before[n])]
    assert not still
    model.figures = {"image_active_percent": 12.5}
    model.save_pretrained(tmp_path / "model")
    again = NonNegClip.from_pretrained(tmp_path / "model")
    pairs = squares()
    images, texts = [pairs.open(row) for row in range(5)], pairs.captions
    assert torch.equal(again.encode(images, dense=True), model.encode(images, dense=True))
    assert torch.equal(again.encode(texts, dense=True), model.encode(texts, dense=True))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "12.5" in card
    assert "library_name: ncl_multi" in card


def test_an_open_clip_model_trains_saves_loads_and_gives_the_same_codes(open_clip_towers, tmp_path):
    check_train_save_load(open_clip_towers, tmp_path)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_hugging_face_model_trains_saves_loads_and_gives_the_same_codes(kind, tmp_path):
    check_train_save_load(hugging_face_towers(tmp_path, kind), tmp_path)


def test_two_towers_of_ones_own_train_save_load_and_give_the_same_codes(tmp_path):
    hugging_face_towers(tmp_path, "clip").tokenizer.save_pretrained(tmp_path / "bert")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=20,
    )  # fmt: skip
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "bert")
    from ncl_multi.adapters.clip.load import _two_towers

    towers = _two_towers(
        "own", "test_efficientnet", str(tmp_path / "bert"), image_size=32, pretrained=False
    )
    stages = 2 * (32 + 48 + 64)
    assert (towers.image_dim, towers.text_dim) == (2 * 256 + stages, 4 * 16)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        seen = towers.eval().image(pixels)
        assert torch.allclose(seen[:, :256], towers.model.encode_image(pixels), atol=1e-6)
        trunk = towers.model.visual.trunk
        last = trunk.blocks(trunk.bn1(trunk.conv_stem(pixels)))
        final = trunk.bn2(trunk.conv_head(last))
    maxima = [maps.amax(dim=(2, 3)) for maps in (last, final)]
    expected = torch.cat([last.mean(dim=(2, 3)), *maxima], dim=1)
    assert torch.allclose(seen[:, -384:], expected, atol=1e-6)
    # Version 0.1 saved no word on stages: its heads read the last one only.
    towers.save(tmp_path / "saved")
    path = tmp_path / "saved" / "open_clip_config.json"
    settings = json.loads(path.read_text())
    assert settings.pop("all_stages")
    path.write_text(json.dumps(settings))
    earlier = OpenClipTowers.load(tmp_path / "saved")
    assert (earlier.image_dim, earlier.text_dim) == (256, 4 * 16)
    assert earlier.eval().image(pixels).shape == (2, 256)
    tokens = towers.tokens(["a square", "a"])
    assert tokens.shape == (2, 3)
    with torch.no_grad():
        h, alone = towers.eval().text(tokens), towers.text(tokens[1:, :2])
        assert torch.allclose(h[:, 32:48], towers.model.encode_text(tokens), atol=1e-6)
    assert torch.allclose(h[1:], alone, atol=1e-6)
    check_train_save_load(towers, tmp_path)


def test_codes_are_non_negative_unit_rows_and_sparse(open_clip_towers):
    model = NonNegClip(open_clip_towers, 64, density=0.1)
    pairs = squares()
    codes = model.encode([pairs.open(row) for row in range(len(pairs))])
    assert isinstance(codes, csr_array)
    assert codes.shape == (24, 64)
    assert codes.data.min() > 0
    lengths = np.sqrt(codes.multiply(codes).sum(axis=1))
    assert lengths[lengths > 0] == pytest.approx(1)
    assert np.allclose(codes.toarray(), model.encode(
        [pairs.open(row) for row in range(len(pairs))], dense=True, batch_size=5
    ).numpy(), atol=1e-6)  # fmt: skip
    assert model.encode([]).shape == (0, 64)


def test_a_shared_head_standardises_both_sides_together_and_needs_one_width():
    torch.manual_seed(0)
    heads = ClipHeads(6, 6, 10, shared=True)
    h_image, h_text = torch.randn(8, 6), torch.randn(8, 6)
    z_image, z_text, _ = heads(h_image, h_text)
    both = torch.cat([h_image, h_text])
    expected = heads.image(F.normalize(both, dim=1) * 6**0.5)
    assert torch.allclose(torch.cat([z_image, z_text]), expected)
    with pytest.raises(ValueError, match="one width; got 6 for images and 5"):
        ClipHeads(6, 5, 10, shared=True)


def test_the_temperature_is_learnt_and_never_passes_its_cap():
    heads = ClipHeads(6, 5, 10, temperature=0.05, min_temperature=0.02)
    _, _, temperature = heads(torch.randn(8, 6), torch.randn(8, 5))
    assert temperature.item() == pytest.approx(0.05)
    temperature.backward()
    assert heads.contrast.log_temperature.grad is not None
    heads.contrast.log_temperature.data.fill_(-10)
    assert heads.contrast.temperature.item() == pytest.approx(0.02)


def test_centred_heads_take_the_mean_of_the_given_features_off():
    heads = ClipHeads(6, 5, 10).eval()
    h_image, h_text = torch.rand(8, 6), torch.rand(9, 5)
    heads.centre(h_image, h_text)
    unit = F.normalize(h_image, dim=1) * 6**0.5
    assert torch.allclose(heads.encode_image(h_image), heads.image(unit - unit.mean(dim=0)))
    unit = F.normalize(h_text, dim=1) * 5**0.5
    assert torch.allclose(heads.encode_text(h_text), heads.text(unit - unit.mean(dim=0)))


def test_codes_are_whole_in_training_and_cut_to_k_when_they_serve():
    heads = ClipHeads(6, 5, 10, k=2)
    h_image, h_text = torch.randn(8, 6), torch.randn(8, 5)
    assert (heads(h_image, h_text)[0] > 0).sum(dim=1).max() > 2
    heads.eval()
    for z in heads(h_image, h_text)[:2]:
        assert (z > 0).sum(dim=1).max() == 2
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.10"):
        ClipHeads(6, 5, 10, k=11)


def test_loss_is_of_whole_codes_of_cut_ones_and_of_how_the_cut_ones_differ():
    heads = ClipHeads(6, 5, 10, k=3).double()
    z = tuple(torch.rand(7, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    t = torch.tensor(0.3, dtype=torch.float64)
    cut = [top_k(side, 3) for side in z]
    said, wanted = (
        torch.stack([torch.stack([F.cosine_similarity(a, b, dim=0) for b in zb]) for a in za]) / t
        for za, zb in (cut, z)
    )
    divergence = sum(
        (w.softmax(0) * (w.log_softmax(0) - s.log_softmax(0))).sum()
        for s, w in [*zip(said, wanted, strict=True), *zip(said.T, wanted.T, strict=True)]
    )
    naive = info_nce(*z, temperature=t) + info_nce(*cut, temperature=t) + divergence / 14
    loss = heads.loss(*z, t)
    assert torch.allclose(loss, naive, rtol=1e-12)
    assert torch.equal(ClipHeads(6, 5, 10).loss(*z, t), info_nce(*z, temperature=t))


@pytest.mark.parametrize("k", [None, 3])
def test_the_spectral_part_is_its_formula_on_whole_and_on_cut_codes(k):
    torch.manual_seed(0)
    z = tuple(torch.rand(7, 10, dtype=torch.float64) for _ in range(2))
    t = torch.tensor(0.3, dtype=torch.float64)
    naive = 0.0
    cut = [] if k is None else [tuple(top_k(side, k) for side in z)]
    for za, zb in [z, *cut]:
        cosines = [[float(a @ b / (a.norm() * b.norm())) for b in zb] for a in za]
        rivals = [cosines[i][j] ** 2 for i in range(7) for j in range(7) if i != j]
        partners = [cosines[i][i] for i in range(7)]
        naive += _SQUARED_LENGTH * sum(rivals) / 42 - 2 * sum(partners) / 7
    with_it, without = (ClipHeads(6, 5, 10, k=k, spectral=w).loss(*z, t) for w in (2.5, 0.0))
    assert (with_it - without).item() == pytest.approx(2.5 * naive, rel=1e-9)
    alone = ClipHeads(6, 5, 10, k=k, spectral=2.5, contrast=0.0).loss(*z, t)
    assert alone.item() == pytest.approx(2.5 * naive, rel=1e-9)
    for wrong in ({"spectral": -1.0}, {"contrast": -1.0}, {"contrast": 0.0}):
        with pytest.raises(ValueError, match="spectral and contrast must be at least 0"):
            ClipHeads(6, 5, 10, **wrong)


def test_the_spectral_part_does_not_know_lengths_and_survives_rows_of_zeros():
    torch.manual_seed(0)
    za, zb = torch.rand(7, 10, dtype=torch.float64), torch.rand(7, 10, dtype=torch.float64)
    longer = za * torch.linspace(1, 9, 7)[:, None]
    found = spectral_of_cosines(za, zb, 4.0).item()
    assert spectral_of_cosines(longer, zb, 4.0).item() == pytest.approx(found, rel=1e-9)
    none = torch.zeros(7, 10, requires_grad=True)
    loss = spectral_of_cosines(none, zb.float(), 4.0)
    assert loss.item() == 0.0
    loss.backward()
    assert none.grad.isfinite().all()


@pytest.mark.parametrize("shared", [False, True])
def test_heads_that_start_on_clusters_fire_the_same_dimension_for_image_and_caption(shared):
    """Four kinds of pair, each image with two captions, and images that look like nothing else."""
    torch.manual_seed(0)
    y = torch.arange(80) % 4
    image_kind, text_kind = 3 * torch.randn(4, 12), 3 * torch.randn(4, 12 if shared else 9)
    h_image = image_kind[y] + 0.1 * torch.randn(80, 12) + 2
    h_text = text_kind.repeat_interleave(2, dim=0) + 0.1 * torch.randn(8, text_kind.shape[1])
    links = torch.stack([torch.arange(80).repeat(2), torch.cat([2 * y, 2 * y + 1])], dim=1)
    heads = ClipHeads(12, text_kind.shape[1], 8 if shared else 4, shared=shared)
    heads.centre(h_image, h_text)
    heads.start_on_clusters(h_image, h_text, links)
    seen, said = (z.argmax(dim=1) for z in heads(h_image, h_text[2 * y])[:2])
    assert len(set(zip(y.tolist(), seen.tolist(), strict=True))) == 4 == len(seen.unique())
    if not shared:
        assert torch.equal(seen, said)


def test_dropout_acts_in_training_only():
    heads = ClipHeads(6, 5, 10, dropout=0.5)
    h = torch.randn(8, 6), torch.randn(8, 5)
    assert not torch.equal(heads(*h)[0], heads(*h)[0])
    heads.eval()
    assert torch.equal(heads(*h)[0], heads(*h)[0])
    with pytest.raises(ValueError, match="dropout"):
        ClipHeads(6, 5, 10, dropout=1.0)


def test_the_loss_keeps_open_clips_contract():
    torch.manual_seed(0)
    image, text = torch.randn(8, 16), torch.randn(8, 16)
    scale = torch.tensor(14.0)
    loss = NonNegClipLoss()
    theirs = open_clip.ClipLoss()(
        F.normalize(image.relu(), dim=1), F.normalize(text.relu(), dim=1), scale
    )
    assert loss(image, text, scale).item() == pytest.approx(theirs.item(), rel=1e-5)
    named = loss(image_features=image, text_features=text, logit_scale=scale, output_dict=True)
    assert named["contrastive_loss"].item() == pytest.approx(theirs.item(), rel=1e-5)


def test_open_clips_own_trainer_takes_the_loss():
    train = pytest.importorskip("open_clip_train.train")
    torch.manual_seed(0)
    model = open_clip.CLIP(**TINY, output_dict=True)
    batch = torch.randn(4, 3, 32, 32), torch.randint(1, 100, (4, 16))
    loader = Namespace(num_batches=1, num_samples=4, batch_size=4)

    class Loader(Namespace):
        def __iter__(self):
            return iter([batch])

    data = {"train": Namespace(set_epoch=lambda epoch: None, dataloader=Loader(**vars(loader)))}
    args = Namespace(
        device="cpu", precision="fp32", distill=False, accum_freq=1, skip_scheduler=True,
        horovod=False, grad_clip_norm=None, log_every_n_steps=1, batch_size=4, world_size=1,
        rank=0, wandb=False, save_logs=False, local_rank=0,
    )  # fmt: skip
    before = model.text_projection.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train.train_one_epoch(model, data, NonNegClipLoss(), 0, optimizer, None, None, None, args)
    assert not torch.equal(before, model.text_projection)


def test_the_model_runs_forward_on_a_gpu_that_is_not_there(open_clip_towers):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = NonNegClip(open_clip_towers, 16, dropout=0.1).eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to("cuda")
        tokens = torch.zeros(4, 16, dtype=torch.long, device="cuda")
        z_image, z_text, temperature = model(torch.randn(4, 3, 32, 32, device="cuda"), tokens)
        assert {z.device.type for z in (z_image, z_text, temperature)} == {"cuda"}


@pytest.mark.parametrize(
    ("name", "offered"),
    [("ViT-B-23", "ViT-B-32"), ("vit-b-32x", "ViT-B-32"), ("ViT-B-32:laion2", "laion2b_e16")],
)
def test_an_unknown_model_name_offers_the_nearest(name, offered):
    with pytest.raises(ValueError, match=f"nearest known names are: .*{offered}"):
        load_towers(name)


def test_an_unknown_timm_tower_offers_the_nearest():
    with pytest.raises(ValueError, match=r"image tower 'resnet5'.*resnet50"):
        load_towers("resnet5+somewhere/some-model")


def write_folder(folder, count=20):
    folder.mkdir(exist_ok=True)
    lines = ["image,caption"]
    for row in range(count):
        name = list(COLOURS)[row % 4]
        (folder / f"{row}.png").write_bytes(png(name, row))
        lines += [f"{row}.png,a {name} square", f'{row}.png,"{name}, number {row}"']
    (folder / "captions.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_folder_with_captions_is_read_and_every_tenth_image_kept_back(tmp_path):
    splits = read_pairs(str(write_folder(tmp_path)))
    assert splits["test"].image_names == ["9.png", "19.png"]
    said = {"a green square", "green, number 9", "a black square", "black, number 19"}
    assert set(splits["test"].captions) == said
    train = splits["train"]
    assert len(train) == 18
    red = train.captions.index("a red square")
    assert train.relevant().toarray()[:, red].sum() == 5
    assert train.open(0).getpixel((0, 0)) == COLOURS["red"]


@pytest.mark.parametrize("name", ["captions.csv", "captions.txt"])
def test_captions_are_read_as_users_write_them(tmp_path, name, capsys):
    write_folder(tmp_path, 10)
    (tmp_path / "captions.csv").unlink()
    long = "very " * 30_000 + "long"
    captions = ["une fête à la mer", long, "", *["red"] * 7]
    lines = [f"{row}.png;{caption}" for row, caption in enumerate(captions)]
    lines.append("2.png;said after all")
    content = "\r\n".join(["image;caption", *lines])
    (tmp_path / name).write_bytes(content.encode("utf-16"))
    splits = read_pairs(str(tmp_path))
    assert splits["train"].captions == ["une fête à la mer", long, "red"]
    assert splits["test"].captions == ["said after all"]
    assert "left out 1: caption is empty (line 4)" in capsys.readouterr().err


def write_tar(path, entries):
    from io import BytesIO

    with tarfile.open(path, "w") as tar:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))


def test_webdataset_tars_are_read(tmp_path):
    for shard in range(2):
        entries = {}
        for row in range(6):
            entries[f"{row:03d}.png"] = png("blue", row)
            said = {"caption": f"blue {shard} {row}"}
            caption = (f"{row:03d}.json", json.dumps(said)) if shard else (f"{row:03d}.txt", "blue")
            entries[caption[0]] = caption[1].encode()
        write_tar(tmp_path / f"{shard}.tar", entries)
    splits = read_pairs(str(tmp_path))
    assert len(splits["train"]) == 11
    assert splits["test"].captions == ["blue 1 3"]
    assert splits["test"].open(0).getpixel((0, 0)) == COLOURS["blue"]


def test_a_hub_table_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    cells = [{"bytes": png("red", row), "path": None} for row in range(3)]
    columns = {"image": cells, "captions": [["red", "a red square"]] * 3}
    kinds = {"image": datasets.Image(), "captions": datasets.List(datasets.Value("string"))}
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    for split in ("train", "test"):
        table.to_parquet(tmp_path / f"{split}.parquet")
    splits = read_pairs(f"hf:{tmp_path}")
    assert splits["test"].captions == ["red", "a red square"]
    assert splits["train"].open(2).getpixel((0, 0)) == COLOURS["red"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            "file,text\na.png,red\n",
            r"column 'image' of .* does not exist. Columns:\n  file: 'a.png' \(file paths\)",
        ),
        ("image,caption\n0.png,red\nlost.png,red\n", r"names 1 images .*: lost.png \(line 3\)"),
        ("image,caption\n0.png,red\n../1.png,red\n", r"outside its folder: ../1.png \(line 3\)"),
        ("image,caption\n0.png,red\n/1.png,red\n", r"outside its folder: /1.png \(line 3\)"),
        ("image,caption\n0.png,red\n", "at least 10 are needed"),
        ("image,caption\n0.png,red, round\n", "line 2 has 3 cells where the first line has 2"),
        ("", "expected a line of column names"),
    ],
)
def test_a_captions_file_that_is_wrong_is_refused_with_its_reason(tmp_path, content, complaint):
    write_folder(tmp_path)
    (tmp_path / "captions.csv").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read_pairs(str(tmp_path))


def test_tars_that_are_wrong_are_refused_with_their_reason(tmp_path):
    write_tar(tmp_path / "0.tar", {"1.png": png("red")})
    with pytest.raises(ValueError, match=r"without a caption.*0.tar/1"):
        read_pairs(str(tmp_path))
    write_tar(tmp_path / "0.tar", {"1.png": png("red"), "1.txt": b" "})
    with pytest.raises(ValueError, match=r"1 empty captions: 0\.tar/1"):
        read_pairs(str(tmp_path))
    (tmp_path / "0.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ValueError, match="is not a plain tar file"):
        read_pairs(str(tmp_path))


def test_data_of_an_unknown_name_is_refused():
    with pytest.raises(FileNotFoundError, match="flikr8k does not exist: expected emoji"):
        read_pairs("flikr8k")


def test_a_transparent_image_is_encoded_on_white_as_it_is_trained(tmp_path):
    model = NonNegClip(hugging_face_towers(tmp_path, "clip"), 16, k=None)
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    data = pairs_of("clear", "train", [tmp_path / "clear.png"], ["clear"], [["a square"]])
    assert data.open(0).getpixel((0, 0)) == (255, 255, 255)
    trained, *others = (
        model.encode([image], dense=True)
        for image in (data.open(0), clear, tmp_path / "clear.png", Image.new("RGB", (32, 32)))
    )
    assert torch.equal(trained, others[0])
    assert torch.equal(trained, others[1])
    assert not torch.equal(trained, others[2]), "black is another picture"


def test_an_image_that_does_not_decode_is_left_out_counted_and_named(
    open_clip_towers, tmp_path, capsys
):
    folder = write_folder(tmp_path / "data")
    (folder / "4.png").write_bytes(b"no image")
    (folder / "5.png").write_bytes(png("red")[:40])
    train = read_pairs(str(folder))["train"]
    features = tower_features(open_clip_towers, train, tmp_path / "cache", batch_size=4)
    assert "left out 2 of 18 pictures" in capsys.readouterr().err
    assert len(features.pairs) == features.image.shape[1] == 16
    assert "red, number 4" not in features.pairs.captions
    source = PixelPairs(train, open_clip_towers)
    assert source[4][1] == 6
    assert "4.png" in capsys.readouterr().err


def test_cached_features_are_those_of_the_towers_and_are_read_back(open_clip_towers, tmp_path):
    pairs = squares()
    first = tower_features(open_clip_towers, pairs, tmp_path, views=3, batch_size=5)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = tower_features(open_clip_towers, pairs, tmp_path, views=3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == files
    assert torch.equal(first.image, again.image)
    with torch.no_grad():
        pixels = torch.stack([open_clip_towers.pixels(pairs.open(row)) for row in range(24)])
        expected = open_clip_towers.image(pixels)
        texts = open_clip_towers.text(open_clip_towers.tokens(pairs.captions))
    assert torch.allclose(first.image[0].float(), expected, atol=2e-3)
    assert torch.allclose(first.text.float(), texts, atol=2e-3)


def test_a_cache_made_by_another_model_or_cut_short_is_refused(open_clip_towers, tmp_path):
    tower_features(open_clip_towers, squares(), tmp_path)
    (shard,) = tmp_path.glob("*-view0-*/*.safetensors")
    with torch.no_grad():
        open_clip_towers.model.visual.proj.add_(1)
    tower_features(open_clip_towers, squares(), tmp_path)
    (target,) = [path for path in tmp_path.glob("*-view0-*/*.safetensors") if path != shard]
    target.write_bytes(shard.read_bytes())
    with pytest.raises(ValueError, match=r"made with another weights .*Delete"):
        tower_features(open_clip_towers, squares(), tmp_path)
    target.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cut short"):
        tower_features(open_clip_towers, squares(), tmp_path)


def test_a_draw_gives_an_image_one_of_its_own_captions_and_groups_the_same_caption():
    pairs = squares()
    rows = torch.arange(24).repeat(20)
    torch.manual_seed(0)
    caption, groups = pairs.draw(rows)
    assert torch.equal(caption, groups)
    right = pairs.relevant().toarray()
    assert right[rows.numpy(), caption.numpy()].all()
    both = {(row, said) for row, said in zip(rows.tolist(), caption.tolist(), strict=True)}
    assert len(both) == len(pairs.links)
    features = TowerFeatures(pairs, torch.rand(2, 24, 3), torch.rand(len(pairs.captions), 4))
    torch.manual_seed(0)
    image, text, _ = features.draw(rows)
    assert torch.equal(text, features.text[caption])
    assert ((image == features.image[0, rows]) | (image == features.image[1, rows])).all()


def test_held_out_images_and_the_rest_are_all_images_with_their_captions():
    pairs = squares()
    rest, held = pairs.hold_out(5)
    assert rest.image_names + held.image_names == pairs.image_names
    for part in (rest, held):
        for row, name in enumerate(part.image_names):
            own = {part.captions[c] for i, c in part.links.tolist() if i == row}
            whole = {pairs.captions[c] for i, c in pairs.links.tolist() if i == int(name)}
            assert own == whole
    with pytest.raises(ValueError, match="can hold out 1 to 23"):
        pairs.hold_out(24)


def test_a_caption_of_several_images_is_found_at_any_of_them():
    z_image = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]])
    z_text = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    relevant = csr_array(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    row = both_ways(z_image, z_text, relevant)
    assert row["t2i_r_at_1"] == 50
    assert row["t2i_r_at_5"] == 100
    assert row["i2t_r_at_1"] == 100
    several = csr_array(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    assert both_ways(z_image, z_text, several)["t2i_r_at_1"] == 100


def test_codes_of_zeros_score_what_chance_would():
    zeros = torch.zeros(20, 4)
    row = both_ways(zeros, zeros, csr_array(np.eye(20)))
    assert row["t2i_r_at_1"] == pytest.approx(5)
    assert row["i2t_r_at_10"] == pytest.approx(50)
    assert row["t2i_median_rank"] == pytest.approx(10.5)


def test_the_curve_is_retrieval_of_truncated_rows():
    torch.manual_seed(0)
    z = torch.rand(30, 8)
    curve = truncation_curve(
        csr_array(z.numpy()), csr_array(z.numpy()), csr_array(np.eye(30)), (1, 8, 9)
    )
    assert list(curve) == [1, 8]
    assert curve[8]["t2i_r_at_10"] == 100
    largest = z.argmax(dim=1)
    alike = (largest[:, None] == largest).sum(dim=1).double()
    assert curve[1]["t2i_r_at_10"] == pytest.approx(100 * (10 / alike).clamp(max=1).mean().item())


def test_zero_shot_takes_the_mean_of_the_templates_among_classes_that_occur():
    directions = {"cat": [1.0, 0.0], "a dog": [0.0, 1.0], "a cat": [0.0, 1.0], "dog": [0.0, 1.0]}
    asked = []

    def encode_text(texts):
        asked.extend(texts)
        return torch.tensor([directions[text] for text in texts])

    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.2]])
    y = torch.tensor([0, 2, 2])
    accuracy = zero_shot_accuracy(z, y, ["cat", "bird", "dog"], encode_text, ("{}", "a {}"))
    assert accuracy == pytest.approx(100 * 2 / 3)
    assert asked == ["cat", "a cat", "dog", "a dog"]


def test_a_dimension_belongs_to_the_side_that_fires_it():
    z_image = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    z_text = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    share = image_share(z_image, z_text)
    assert share[:3].tolist() == [1, 0, 0.5]
    assert np.isnan(share[3])
    assert np.array_equal(
        image_share(csr_array(z_image.numpy()), csr_array(z_text.numpy())), share, equal_nan=True
    )


def test_dimensions_are_described_by_the_words_and_items_that_fire_them():
    pairs = squares(8)
    z_text = np.zeros((len(pairs.captions), 3), np.float32)
    for row, caption in enumerate(pairs.captions):
        z_text[row, 0] = "red" in caption
        z_text[row, 1] = 0.5 * ("black" in caption)
    z_image = np.zeros((8, 3), np.float32)
    z_image[:, 0] = [1, 0, 0, 0, 2, 0, 0, 0]
    names = names_by_captions(csr_array(z_image), csr_array(z_text), pairs)
    found = describe_dimensions(csr_array(z_image), csr_array(z_text), pairs, names)
    assert found[0]["name"].split(", ")[0] == "red"
    assert found[0]["images"] == ["4", "0"]
    assert set(found[1]["captions"]) == {"a black square", "black 3", "black 7"}
    assert found[1]["image_share"] == 0
    assert found[2] == {
        "dimension": 2, "name": "", "captions": [], "images": [], "image_share": None,
    }  # fmt: skip


def test_classes_of_the_images_name_where_their_captions_have_no_word_in_common():
    words = [["poodle", "beagle", "pug"], ["oak", "elm", "fir"]]
    pairs = pairs_of(
        "pairs", "train", [png("red")] * 6, list("abcdef"), [[w] for own in words for w in own],
        y=torch.tensor([0, 0, 0, 1, 1, 1]), classes=["dogs", "trees"],
    )  # fmt: skip
    z = csr_array(np.repeat(np.eye(2, dtype=np.float32), 3, axis=0))
    assert names_by_captions(z, z, pairs) == ["dogs", "trees"]


def test_images_name_a_dimension_whose_captions_have_nothing_in_common():
    said = [["a drum", "music"], ["a drum", "noise"], ["a car", "a road"], ["a bus", "a road"]]
    pairs = pairs_of("pairs", "train", [png("red")] * 4, list("abcd"), said)
    z_image = csr_array(np.repeat(np.eye(2, dtype=np.float32), 2, axis=0))
    odd = [pairs.captions.index(own) for own in ("music", "noise")]
    z_text = np.zeros((len(pairs.captions), 2), np.float32)
    z_text[odd, 0], z_text[pairs.captions.index("a road"), 1] = 1, 1
    assert names_by_captions(csr_array(z_image), csr_array(z_text), pairs)[0] == "drum"


def test_the_emoji_hold_out_a_style_and_a_fifth_of_the_emoji():
    splits = read_pairs("emoji")
    train, unseen, style = splits["train"], splits["unseen"], splits["style"]
    assert not set(train.groups.tolist()) & set(unseen.groups.tolist())
    count = len(set(train.groups.tolist()) | set(unseen.groups.tolist()))
    assert len(set(unseen.groups.tolist())) == count // 5
    assert set(style.groups.tolist()) == set(train.groups.tolist())
    assert all("(Twtr)" in name for name in style.image_names)
    assert style.joined_captions()[:2] == style.captions[:2]
    car = style.image_names.index("automobile (Twtr)")
    assert style.classes[style.y[car]] == "ground transportation"
    assert not any("(Twtr)" in name for name in train.image_names + unseen.image_names)


def test_settings_are_chosen_on_training_emoji_of_another_vendor_and_on_other_emoji():
    import runpy

    choose = runpy.run_path(str(ROOT / "evals/choose_clip.py"), run_name="eval")
    cells = [(vendor, row) for vendor in ("Appl", "Goog", "Msft") for row in range(20)]
    pairs = pairs_of(
        "emoji", "train", [png("red")] * 60, [f"kind {row} ({vendor})" for vendor, row in cells],
        [[f"kind {row}", f"kind {row}, tag"] for _, row in cells],
        groups=torch.tensor([row for _, row in cells]),
    )  # fmt: skip
    image, text = torch.arange(60.0).reshape(1, 60, 1), torch.arange(40.0)[:, None]
    splits = choose["hold_out"](TowerFeatures(pairs, image, text), "Goog")
    assert {name: len(own) for name, own in splits.items()} == {
        "train": 32, "style": 16, "unseen": 8,
    }  # fmt: skip
    groups = {name: set(own.pairs.groups.tolist()) for name, own in splits.items()}
    assert groups["train"] == groups["style"]
    assert not groups["train"] & groups["unseen"]
    for name, own in splits.items():
        vendors = {said[-5:-1] for said in own.pairs.image_names}
        assert vendors == ({"Goog"} if name == "style" else {"Appl", "Msft"})
        # Features followed their rows, and held-out images are searched by their label only.
        assert own.image[0, :, 0].long().tolist() == [
            pairs.image_names.index(said) for said in own.pairs.image_names
        ]
        assert own.text[:, 0].long().tolist() == [
            pairs.captions.index(said) for said in own.pairs.captions
        ]
        assert any("tag" in said for said in own.pairs.captions) == (name == "train")
    with pytest.raises(ValueError, match="vendor 'Nobody'"):
        choose["hold_out"](TowerFeatures(pairs, image, text), "Nobody")


def test_settings_for_captioned_photos_are_chosen_on_the_last_training_images():
    import runpy

    choose = runpy.run_path(str(ROOT / "evals/choose_clip.py"), run_name="eval")
    said = [[f"a {n}", f"the {n}"] for n in range(6)]
    pairs = pairs_of("flickr8k", "train", [png("red")] * 6, list("abcdef"), said)
    image, text = torch.arange(6.0).reshape(1, 6, 1), torch.arange(12.0)[:, None]
    splits = choose["hold_out_last"](TowerFeatures(pairs, image, text), 2)
    assert splits["train"].pairs.image_names == list("abcd")
    assert splits["validation"].image[0, :, 0].tolist() == [4, 5]
    assert splits["validation"].pairs.captions == ["a 4", "the 4", "a 5", "the 5"]
    assert splits["validation"].text[:, 0].tolist() == [8, 9, 10, 11]


def test_the_recipe_fine_tunes_cuts_and_shortens(tmp_path, monkeypatch):
    """Every figure of the table has its place, and both models that are saved give codes."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import clip_ncl

    lay_out(tmp_path)
    cfg = clip_ncl.Config(
        out=tmp_path / "run", data=str(tmp_path / "pairs"), model=f"hf:{tmp_path / 'clip'}",
        dims=64, k=8, shorten=16, finetune=True, steps=2, batch_size=32, device="cpu", twin=False,
    )  # fmt: skip
    clip_ncl.main(cfg)
    figures = json.loads((cfg.out / "metrics.json").read_text())
    assert [*figures] == ["ncl", *(f"ncl@{k}" for k in (3, 6, 8, 16, 64)), "ncl_shortened"]
    measured = both_ways(*2 * [torch.eye(2)], csr_array(np.eye(2))).keys()
    for model, (row,) in ((name, own.values()) for name, own in figures.items()):
        assert row.keys() == measured if model != "ncl" else row.keys() > measured
    (row,), (cut,) = figures["ncl"].values(), figures[f"ncl@{cfg.k}"].values()
    assert cut["t2i_r_at_10"] == pytest.approx(row["t2i_r_at_10"])
    widths = {"model": 64, "short": 16}
    for name, width in widths.items():
        codes = NonNegClip.from_pretrained(cfg.out / name).encode(["a dog"])
        assert codes.shape == (1, width)
        assert 0 < codes.nnz <= 8


def test_the_recipe_compares_with_plain_contrastive_heads(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import clip_ncl

    lay_out(tmp_path)
    cfg = clip_ncl.Config(
        out=tmp_path / "run", data=str(tmp_path / "pairs"), model=f"hf:{tmp_path / 'clip'}",
        dims=16, k=4, contrast=0.5, compare=True, steps=2, batch_size=32, device="cpu",
        cache=tmp_path / "cache",
    )  # fmt: skip
    clip_ncl.main(cfg)
    figures = json.loads((cfg.out / "metrics.json").read_text())
    assert {"ncl", "twin", "plain"} <= figures.keys()
    twin, plain = (
        NonNegClip.from_pretrained(cfg.out / name / "model") for name in ("twin", "plain")
    )
    assert twin.heads.image.activation == plain.heads.image.activation == "none"
    assert (twin.heads.spectral, plain.heads.spectral) == (10, 0)
    assert (twin.heads.contrast_weight, plain.heads.contrast_weight) == (0.5, 1)
    told = json.loads((cfg.out / "plain" / "config.json").read_text())
    assert (told["start"], told["spectral"]) == ("random", 0)
