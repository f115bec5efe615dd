"""A shorter model is the model, with fewer columns: in memory, on disk and in every adapter."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import nn
from torch.nn import functional as F

from ncl_multi import Features, NonNegHead, shorten
from ncl_multi.codes.shorten import worth_keeping


def trained(head, width, batches=5):
    generator = torch.Generator().manual_seed(0)
    head.train()
    with torch.no_grad():
        for _ in range(batches):
            head(torch.randn(64, width, generator=generator) * 2 + 1)
    return head.eval()


HEADS = [
    {},
    {"hidden_dim": 12},
    {"density": 0.1},
    {"density": 0.1, "hidden_dim": 12},
    {"batch_norm": False},
    {"activation": "rep_relu"},
    {"activation": "none"},
]


@pytest.mark.parametrize("options", HEADS)
def test_a_shorter_head_gives_the_most_active_columns(options):
    torch.manual_seed(0)
    head = trained(NonNegHead(8, 40, **options), 8)
    x = torch.randn(50, 8)
    with torch.no_grad():
        z = head(x)
    expected_dims = F.normalize(z, dim=1).mean(dim=0).topk(10).indices.sort().values
    shorter = shorten(head, 10, z, by="activation")
    assert torch.equal(worth_keeping(z, 10, by="activation"), expected_dims)
    torch.testing.assert_close(shorter(x).detach(), z[:, expected_dims])
    torch.testing.assert_close(
        shorter.fold()(x).detach(), z[:, expected_dims], atol=1e-5, rtol=1e-5
    )
    assert not shorter.training
    assert shorter.density == head.density
    assert torch.equal(head(x), z)


def covering_by_hand(z, count):
    """Each time the column furthest from the span of those taken."""
    z = F.normalize(z.double(), dim=1).numpy()
    taken = []
    for _ in range(count):
        rest = z
        if taken:
            rest = z - z[:, taken] @ np.linalg.lstsq(z[:, taken], z, rcond=None)[0]
        far = (rest**2).sum(axis=0)
        far[taken] = -1
        taken.append(int(far.argmax()))
    return sorted(taken)


def test_coverage_takes_what_the_rest_does_not_explain():
    z = torch.rand(80, 30, generator=torch.Generator().manual_seed(0))
    assert worth_keeping(z, 12).tolist() == covering_by_hand(z, 12)


def test_coverage_takes_copies_once_and_the_dead_last():
    z = torch.rand(80, 6, generator=torch.Generator().manual_seed(0))
    z = torch.cat([z, z, torch.zeros(80, 3)], dim=1)
    assert sorted(n % 6 for n in worth_keeping(z, 6).tolist()) == list(range(6))
    assert len(set(worth_keeping(z, 14).tolist())) == 14


def test_all_dimensions_kept_change_nothing():
    head = trained(NonNegHead(8, 40), 8)
    x = torch.randn(50, 8)
    assert torch.equal(shorten(head, 40, head(x))(x), head(x))


def test_k_is_at_most_the_new_width():
    head = trained(NonNegHead(8, 40, k=20), 8)
    z = head(torch.randn(50, 8))
    assert shorten(head, 10, z).k == 10
    assert shorten(head, 30, z).k == 20


def test_precision_and_frozen_weights_stay():
    head = trained(NonNegHead(8, 40).double(), 8, batches=0)
    head.out.weight.requires_grad_(False)
    shorter = shorten(head, 10, torch.rand(5, 40))
    assert shorter.out.weight.dtype == torch.float64
    assert not shorter.out.weight.requires_grad


def test_features_may_come_in_any_form_and_sides_count_alike():
    images = torch.tensor([[0.0, 0.0, 1.0]] * 90)
    texts = torch.tensor([[0.9, 0.4, 0.0]])
    for by in ("activation", "coverage"):
        assert worth_keeping(Features(images), 1, by=by).tolist() == [2]
        assert worth_keeping(csr_array(texts.numpy()), 1, by=by).tolist() == [0]
        assert worth_keeping([Features(images), texts], 2, by=by).tolist() == [0, 2]


def test_bad_input_is_refused(unchecked):
    head = NonNegHead(8, 40)
    with pytest.raises(ValueError, match="by must be coverage or activation; got 'size'"):
        shorten(head, 10, torch.rand(5, 40), by="size")
    with pytest.raises(ValueError, match=r"dims must lie in 1..40, the width of the codes; got 41"):
        shorten(head, 41, torch.rand(5, 40))
    with pytest.raises(ValueError, match="this model, 40 wide; got 30"):
        shorten(head, 10, torch.rand(5, 30))
    with pytest.raises(ValueError, match="at least one code each"):
        shorten(head, 10, torch.rand(0, 40))
    with pytest.raises(ValueError, match="at least one code each"):
        shorten(head, 10, [])
    with pytest.raises(ValueError, match="Linear has none"):
        shorten(nn.Linear(3, 3), 2, torch.rand(5, 3))
    with pytest.raises(ValueError, match="equally wide; got 3, 4"):
        worth_keeping([torch.rand(5, 3), torch.rand(5, 4)], 2)
    two = nn.ModuleList([NonNegHead(8, 40), NonNegHead(8, 30)])
    with pytest.raises(ValueError, match=r"equally wide; got \[30, 40\]"):
        shorten(two, 10, torch.rand(5, 40))


def columns(z, expected_dims):
    return F.normalize(torch.as_tensor(z[:, expected_dims.numpy()]), dim=1)


def test_a_wrapped_encoder_saves_loads_and_exports_shorter(tmp_path):
    pytest.importorskip("transformers")
    from tiny_text import SENTENCES, tiny_bert, tiny_tokenizer

    import ncl_multi as ncl
    from ncl_multi.adapters.sentence.model import NonNegEncoder

    model = ncl.wrap(tiny_bert(), dims=64, processor=tiny_tokenizer())
    codes = model.encode(SENTENCES)
    shorter = shorten(model, 16, codes)
    expected = model.encode(SENTENCES, dense=True)
    assert expected.shape == (6, 64)
    got = shorter.encode(SENTENCES, dense=True)
    torch.testing.assert_close(got, columns(expected, worth_keeping(codes, 16)))
    shorter.save_pretrained(tmp_path / "model")
    again = NonNegEncoder.from_pretrained(tmp_path / "model")
    assert again.head.out_dim == 16
    assert torch.equal(again.encode(SENTENCES, dense=True), got)


def test_clip_is_cut_to_the_same_dimensions_on_both_sides(tmp_path):
    open_clip = pytest.importorskip("open_clip")
    from ncl_multi.adapters.clip.model import NonNegClip
    from ncl_multi.adapters.clip.towers import OpenClipTowers

    size = {"width": 32, "layers": 1}
    config = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 32, "patch_size": 16, "head_width": 16, **size},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "heads": 2, **size},
    }
    tokenizer = open_clip.SimpleTokenizer(context_length=16)
    tower = open_clip.CLIP(**config)
    tower.visual.preprocess_cfg = vars(open_clip.transform.PreprocessCfg(size=32))
    model = NonNegClip(
        OpenClipTowers("tiny", tower, config, tokenizer), dims=48, density=0.2, k=20
    ).eval()
    h_image, h_text = (
        torch.randn(30, model.towers.image_dim),
        torch.randn(30, model.towers.text_dim),
    )
    z_image, z_text, _ = model.heads(h_image, h_text)
    shorter = shorten(model, 12, [z_image, z_text])
    assert shorter.dims == shorter.options()["k"] == 12
    assert model.dims == 48
    shorter.save_pretrained(tmp_path / "model")
    again = NonNegClip.from_pretrained(tmp_path / "model")
    for got, expected in zip(
        again.heads(h_image, h_text), shorter.heads(h_image, h_text), strict=True
    ):
        assert torch.equal(got, expected)
    assert again.heads(h_image, h_text)[0].shape == (30, 12)


def test_a_vision_model_saves_and_loads_shorter(tmp_path):
    pytest.importorskip("timm")
    from ncl_multi.adapters.vision.model import NonNegVision

    model = NonNegVision("resnet-small", dims=64, hidden_dim=None, k=40).eval()
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    shorter = shorten(model, 16, model.encode(images))
    shorter.save_pretrained(tmp_path / "model")
    again = NonNegVision.from_pretrained(tmp_path / "model").eval()
    assert again.head.out_dim == again.head.k == 16
    assert torch.equal(again.encode(images, dense=True), shorter.encode(images, dense=True))


def test_a_graph_model_saves_and_loads_shorter(tmp_path):
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data

    from ncl_multi.adapters.graph.model import NonNegGraph

    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    data = Data(x=torch.rand(5, 8), edge_index=edges)
    model = NonNegGraph(64, in_dim=8, width=4).eval()
    shorter = shorten(model, 16, model.encode(data))
    shorter.save_pretrained(tmp_path / "model")
    again = NonNegGraph.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(again.encode(data, dense=True), shorter.encode(data, dense=True))
    assert again.encode(data).shape == (5, 16)
