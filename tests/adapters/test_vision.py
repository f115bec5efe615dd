"""Views against torchvision and kornia; the model; the real recipe, killed, stopped, doubled."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

timm = pytest.importorskip("timm")
kornia = pytest.importorskip("kornia")
transforms = pytest.importorskip("torchvision.transforms.v2")

from ncl_multi import info_nce, spectral  # noqa: E402
from ncl_multi.adapters.vision.model import NonNegClassifier, NonNegVision, backbone, lars  # noqa: E402
from ncl_multi.adapters.vision.objective import SimCLR, Supervised  # noqa: E402
from ncl_multi.adapters.vision.views import Views, recolour, resampling  # noqa: E402
from ncl_multi.data.pictures import ImageSet  # noqa: E402

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/vision_ncl.py"


def load_recipe(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"recipes/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pictures():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)


@pytest.fixture
def one_thread():
    """Sums in the same order as in the recipe's own process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("box", [(0, 0, 32, 32), (3, 5, 20, 11), (30, 1, 2, 31), (7, 7, 1, 1)])
@pytest.mark.parametrize("size", [32, 16, 47])
def test_a_crop_is_torchvisions_crop(pictures, box, size):
    x = pictures.double() / 255
    top, left, height, width = (torch.full((8,), float(side)).double() for side in box)
    rows, columns = resampling(top, height, 32, size), resampling(left, width, 32, size)
    got = rows[:, None] @ x @ columns[:, None].mT
    expected = transforms.functional.resized_crop(x, *box, [size, size], antialias=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_colour_factors_are_kornias(pictures):
    # Muted colours, so that kornia's clamping after each change does nothing.
    x = 0.4 + 0.2 * pictures.double() / 255
    factor = torch.linspace(0.7, 1.3, 8).double()
    one, zero = torch.ones(8).double(), torch.zeros(8).double()
    bright = recolour(x, factor, one, one, zero)
    torch.testing.assert_close(bright, kornia.enhance.adjust_brightness_accumulative(x, factor))
    contrast = recolour(x, one, factor, one, zero)
    expected = kornia.enhance.adjust_contrast_with_mean_subtraction(x, factor)
    torch.testing.assert_close(contrast, expected, rtol=0, atol=1e-3)
    saturated = recolour(x, one, one, factor, zero)
    expected = kornia.enhance.adjust_saturation_with_gray_subtraction(x, factor)
    torch.testing.assert_close(saturated, expected, rtol=0, atol=1e-3)


def test_a_turn_of_hue_keeps_brightness_and_grey_and_comes_round(pictures):
    x = pictures.double() / 255
    one = torch.ones(8).double()
    luma = x.new_tensor([0.299, 0.587, 0.114])
    turned = recolour(x, one, one, one, 0.25 * one)
    brightness = torch.einsum("nchw,c->nhw", turned, luma)
    torch.testing.assert_close(brightness, torch.einsum("nchw,c->nhw", x, luma), atol=1e-3, rtol=0)
    assert (turned - x).abs().mean() > 0.05
    torch.testing.assert_close(recolour(x, one, one, one, one), x)
    grey = x[:, :1].expand_as(x)
    torch.testing.assert_close(recolour(grey, one, one, one, 0.3 * one), grey, atol=1e-3, rtol=0)


def test_every_picture_gets_a_view_of_its_own(pictures):
    same = pictures[:1].expand(64, -1, -1, -1)
    seen = Views(32, blur_share=0.5)(same)
    assert seen.shape == (64, 3, 32, 32)
    assert seen.min() >= 0
    assert seen.max() <= 1
    assert len(seen.flatten(1).unique(dim=0)) == 64


def test_the_seed_decides_the_views(pictures):
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        seen.append(Views(24)(pictures))
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_the_share_of_each_change_is_the_one_asked_for():
    torch.manual_seed(0)
    ramp = torch.arange(32, dtype=torch.uint8).expand(2000, 3, 32, 32)
    still = Views(32, scale=(1.0, 1.0), ratio=(1.0, 1.0), jitter_share=0.0, grey_share=0.0)(ramp)
    mirrored = still[:, 0, 0, 0] > still[:, 0, 0, -1]
    assert 0.45 < mirrored.float().mean() < 0.55
    colours = torch.stack([torch.full((8, 8), v) for v in (200, 100, 50)]).to(torch.uint8)
    seen = Views(8, jitter_share=0.0)(colours.expand(2000, -1, -1, -1))
    grey = (seen[:, 0] - seen[:, 2]).abs().amax((1, 2)) < 0.01
    assert 0.16 < grey.float().mean() < 0.24


def test_crops_cover_the_share_of_the_picture_asked_for():
    torch.manual_seed(0)
    boxes = Views(32, scale=(0.25, 0.5))._boxes(torch.zeros(2000, 3, 32, 32))
    top, left, height, width = boxes
    share = height * width / 1024
    assert 0.2 < share.min() < 0.3
    assert 0.45 < share.max() < 0.55
    assert (top >= 0).all()
    assert (left + width <= 32).all()
    assert (top + height <= 32).all()


def test_a_blur_is_kornias_blur():
    torch.manual_seed(0)
    x = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    still = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "mirror": 0.0}
    still |= {"jitter_share": 0.0, "grey_share": 0.0}
    got = Views(64, blur_share=1.0, **still)(x)
    candidates = torch.linspace(0.1, 2.0, 100) * 64 / 224
    errors = [
        (kornia.filters.gaussian_blur2d(x / 255, (7, 7), (float(d), float(d))) - got)[
            :, :, 8:-8, 8:-8
        ].abs().max()
        for d in candidates
    ]  # fmt: skip
    assert min(errors) < 5e-3


def test_views_are_three_times_as_fast_as_transforms_of_one_picture_at_a_time():
    torch.manual_seed(0)
    x = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    to_pil = transforms.ToPILImage()
    one_by_one = transforms.Compose(
        [
            to_pil,
            transforms.RandomResizedCrop(32, scale=(0.2, 1.0), antialias=True),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(0.2),
            transforms.PILToTensor(),
            transforms.ToDtype(torch.float32, scale=True),
        ]
    )
    views = Views(32)
    views(x)

    def seconds(work) -> float:
        tries = []
        for _ in range(3):
            start = time.process_time()
            work()
            tries.append(time.process_time() - start)
        return min(tries)

    slow = seconds(lambda: torch.stack([one_by_one(picture) for picture in x]))
    assert slow > 3 * seconds(lambda: views(x))


def small(**options) -> NonNegVision:
    torch.manual_seed(0)
    return NonNegVision("resnet-small", **({"dims": 32, "hidden_dim": None} | options))


def test_codes_are_sparse_unit_rows_and_the_same_dense(pictures):
    model = small(density=0.2)
    model.train()(pictures / 255)
    codes = model.encode(pictures, batch_size=3)
    assert codes.shape == (8, 32)
    assert (codes.data > 0).all()
    lengths = torch.from_numpy(codes.toarray()).norm(dim=1)
    assert all(abs(length - 1) < 1e-5 or length == 0 for length in lengths.tolist())
    torch.testing.assert_close(
        torch.from_numpy(codes.toarray()), model.encode(pictures, dense=True)
    )
    assert model.training


def test_pil_pictures_of_any_size_and_grey_ones_are_taken(pictures):
    from PIL import Image

    model = small().eval()
    as_pil = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in pictures]
    torch.testing.assert_close(model.encode(as_pil, dense=True), model.encode(pictures, dense=True))
    grey = pictures[:, :1]
    torch.testing.assert_close(
        model.encode(grey, dense=True), model.encode(grey.expand(-1, 3, -1, -1), dense=True)
    )
    assert model.encode(pictures[:, :, :20]).shape == (8, 32)


def test_a_saved_model_gives_the_same_codes(pictures, tmp_path):
    model = small(density=0.1, hidden_dim=16)
    model.train()(pictures / 255)
    model.save_pretrained(tmp_path)
    again = NonNegVision.from_pretrained(tmp_path)
    assert torch.equal(again.encode(pictures, dense=True), model.encode(pictures, dense=True))
    assert again.head.density == 0.1
    card = (tmp_path / "README.md").read_text()
    assert "ncl.load" in card
    assert "sparse-embeddings" in card


@pytest.mark.parametrize("name", ["resnet10t", "torchvision/resnet18", "vit_tiny_patch16_224"])
def test_any_backbone_of_timm_or_torchvision_serves(name):
    model = NonNegVision(name, dims=8, hidden_dim=None, size=32)
    assert model.encode(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 8)


@pytest.mark.parametrize(
    ("name", "stem"), [("resnet18", "conv1"), ("torchvision/resnet18", "conv1")]
)
def test_small_pictures_get_the_cifar_stem(name, stem):
    assert getattr(backbone(name, 32), stem).kernel_size == (3, 3)
    assert isinstance(backbone(name, 32).maxpool, torch.nn.Identity)
    assert getattr(backbone(name, 224), stem).kernel_size == (7, 7)


def test_wrong_names_and_pictures_are_told(pictures):
    with pytest.raises(ValueError, match=r"model must be resnet-small, .* got 'resnet1'. Near: "):
        NonNegVision("resnet1")
    with pytest.raises(ValueError, match="torchvision has no classifier 'resnet19'"):
        NonNegVision("torchvision/resnet19")
    with pytest.raises(
        ValueError, match=r"images must be uint8 .* torch\.float32 \(8, 3, 32, 32\)"
    ):
        small().encode(pictures / 255)


def test_lars_leaves_biases_and_norms_alone_and_grows_with_the_batch():
    model = small(batch_norm=False)
    optimizer = lars(0.4, 1e-4, 512)(model.parameters())
    assert isinstance(optimizer, timm.optim.Lars)
    weights, rest = optimizer.param_groups
    assert weights["weight_decay"] == 1e-4
    assert rest["weight_decay"] == 0
    assert {p.ndim for p in rest["params"]} == {1}
    assert weights["lr_scale"] == 2.0
    assert weights["trust_coeff"] == 0.02


def test_a_classifier_returns_the_cross_entropy_of_its_codes(pictures):
    torch.manual_seed(0)
    model = NonNegClassifier("resnet-small", classes=3, dims=16, activation="relu")
    y = torch.arange(8) % 3
    same = Views(
        32, scale=(1.0, 1.0), ratio=(1.0, 1.0), mirror=0.0, jitter_share=0.0, grey_share=0.0
    )
    loss, z = Supervised(model, same)((pictures, y))
    torch.testing.assert_close(z, model.train()(pictures / 255), rtol=1e-3, atol=1e-4)
    expected = torch.nn.functional.cross_entropy(z @ model.classifier.weight.T, y)
    torch.testing.assert_close(loss, expected)
    assert (z >= 0).all()
    assert model.predict(pictures).shape == (8,)


def test_a_classifier_trains_on_views_of_the_size_that_was_asked_for(pictures):
    sides = []
    model = NonNegClassifier("resnet-small", classes=3, dims=16)
    model.encoder.register_forward_pre_hook(lambda _, given: sides.append(given[0].shape[-1]))
    labelled = ImageSet(pictures.repeat(2, 1, 1, 1), torch.arange(16) % 3, ["a", "b", "c"])
    model.fit(labelled, steps=1, batch_size=8, view_scale=0.5, device="cpu", progress=False)
    assert sides == [16]


def test_simclr_is_info_nce_of_two_views_or_the_spectral_loss(pictures):
    same = Views(
        32, scale=(1.0, 1.0), ratio=(1.0, 1.0), mirror=0.0, jitter_share=0.0, grey_share=0.0
    )
    model = small().eval()
    z = model(same(pictures))
    loss, codes = SimCLR(model, same, temperature=0.3)(pictures)
    assert len(codes) == 16
    torch.testing.assert_close(loss, info_nce(z, z, temperature=0.3, within_view=True))
    loss, _ = SimCLR(model, same, temperature=0.5, loss="spectral")((pictures, torch.zeros(8)))
    unit = 2 * torch.nn.functional.normalize(z, dim=1)
    torch.testing.assert_close(loss, spectral(unit, unit))


def test_a_signed_contrast_of_the_features_is_added_with_its_weight(pictures):
    same = Views(
        32, scale=(1.0, 1.0), ratio=(1.0, 1.0), mirror=0.0, jitter_share=0.0, grey_share=0.0
    )
    model = small()
    objective = SimCLR(model, same, signed=0.5).eval()
    h, z = model(same(pictures), features=True)
    p = objective.projector(h)
    assert (p < 0).any()
    expected = info_nce(z, z, within_view=True) + 0.5 * info_nce(p, p, within_view=True)
    torch.testing.assert_close(objective(pictures)[0], expected)


def test_training_views_may_be_smaller_than_the_images(pictures):
    seen = []
    model = small(density=0.2)
    model.encoder.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape[2:])))
    many = pictures.repeat(2, 1, 1, 1)
    model.fit(many, steps=1, batch_size=16, device="cpu", view_scale=0.75, progress=False)
    assert seen == [(24, 24)]
    model.encode(pictures)
    assert seen[-1] == (32, 32)


@pytest.mark.parametrize(("side", "warns"), [(4, True), (8, False)])
def test_bf16_on_a_processor_stays_finite_with_maps_of_one_pixel(pictures, caplog, side, warns):
    tiny = pictures.repeat(2, 1, 1, 1)[:, :, :side, :side]
    model = NonNegVision("resnet-small", dims=64, hidden_dim=16, density=0.2, size=side)
    model.fit(tiny, steps=2, batch_size=16, device="cpu", precision="bf16", progress=False)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert ("over one pixel" in caplog.text) == warns


def on_fake_cuda(module: torch.nn.Module, *inputs):
    """The forward with every weight, buffer and input on a GPU that is not there."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: torch.empty(x.shape, dtype=x.dtype, device="cuda") for name, x in state.items()}
    return torch.func.functional_call(module, state, inputs)


@pytest.mark.parametrize("activation", ["relu", "rep_relu", "none"])
def test_the_forward_stays_on_its_device(activation):
    density = 0.1 if activation == "relu" else None
    model = small(hidden_dim=8, activation=activation, density=density)
    classifier = NonNegClassifier("resnet-small", classes=3, dims=16)
    with FakeTensorMode():
        images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8, device="cuda")
        za, zb = on_fake_cuda(model, Views(32, blur_share=0.5)(torch.cat([images] * 2))).chunk(2)
        assert info_nce(za, zb, within_view=True).device.type == "cuda"
        assert spectral(za, zb).device.type == "cuda"
        batch = images, torch.zeros(4, dtype=torch.long, device="cuda")
        loss, _ = on_fake_cuda(Supervised(classifier, Views(32)), batch)
        assert loss.device.type == "cuda"


TINY = {"data": "digits", "images": 256, "size": 8, "batch_size": 64, "dims": 32, "hidden_dim": 16}
TINY |= {"model": "test_resnet"}
TINY |= {"steps": 20, "checkpoint_every": 4, "log_every": 5, "twin": False, "device": "cpu"}


def start_recipe(out: Path, *launcher: str, **changes) -> subprocess.Popen:
    flags = []
    for name, value in (TINY | changes).items():
        name = name.replace("_", "-")
        flags += (
            [f"--{'' if value else 'no-'}{name}"]
            if isinstance(value, bool)
            else [f"--{name}", str(value)]
        )
    command = [sys.executable, *launcher, str(RECIPE), "--out", str(out), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)


def run_here(out: Path, **changes) -> bytes:
    recipe = load_recipe("vision_ncl")
    recipe.main(recipe.Config(out=out, **(TINY | changes)))
    return (out / "model/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of the run that nobody disturbs."""
    torch.set_num_threads(1)
    return run_here(tmp_path_factory.mktemp("run"))


@pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, undisturbed, one_thread):
    process = start_recipe(tmp_path)
    wait_for(tmp_path / "checkpoint.pt", process)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate()
    assert process.returncode == 130
    assert "run the same command again to resume" in output
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    assert 4 <= saved < 20
    assert not (tmp_path / "model").exists()
    assert run_here(tmp_path) == undisturbed
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 10, 15, 20]


def test_two_processes_train_one_model(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    process = start_recipe(tmp_path, *launcher, twin=True, steps=4, batch_size=32)
    out, output = process.communicate()
    assert process.returncode == 0, output
    assert out.count("what each dimension means") == 1
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert list(metrics) == ["ncl", "twin", "untrained"]
    assert metrics["twin"]["test"]["probe_encoder"] != metrics["untrained"]["test"]["probe_encoder"]
    assert metrics["twin"]["test"]["sparsity"] < 0.1 < metrics["ncl"]["test"]["sparsity"]
    assert (tmp_path / "atlas.html").exists()


@pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
def test_another_run_or_another_shape_is_refused_and_left_alone(tmp_path):
    run_here(tmp_path, steps=2)
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=r"contains another run.*density"):
        run_here(tmp_path, steps=2, density=0.2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dims": 16}))
    with pytest.raises(ValueError, match="does not fit this model"):
        run_here(tmp_path, steps=2, dims=16)
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept


@pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
def test_every_preset_and_loss_of_the_recipe_takes_a_step(tmp_path):
    recipe = load_recipe("vision_ncl")
    shrunk = TINY | {"steps": 2, "batch_size": 32, "model": "resnet-small", "workers": 0}
    for name, preset in recipe.PRESETS.items():
        loss = "info_nce" if name == "quick" else "spectral"
        cfg = replace(preset, out=tmp_path / name, loss=loss, **shrunk)
        recipe.main(replace(cfg, twin=False, data="digits", images=64))
        model = NonNegVision.from_pretrained(tmp_path / name)
        assert all(weight.isfinite().all() for weight in model.parameters())
        assert (model.head.norm is None) == (name != "quick")


@pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
def test_the_supervised_table_has_every_cell(tmp_path):
    recipe = load_recipe("supervised_ncl")
    kept = {k: v for k, v in TINY.items() if k != "twin"} | {"steps": 2, "batch_size": 32}
    recipe.main(recipe.Config(out=tmp_path, **kept))
    rows = json.loads((tmp_path / "metrics.json").read_text())
    assert list(rows) == ["twin", "ncl", "twin_mlp", "ncl_mlp"]
    for row in rows.values():
        assert {"accuracy_scratch", "accuracy_ssl"} <= set(row["test"])
    sparsity = {name: row["test"]["sparsity_scratch"] for name, row in rows.items()}
    assert sparsity["ncl"] > 0.2 > sparsity["twin"]
