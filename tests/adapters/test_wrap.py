"""`wrap`: every kind of encoder, every kind of pooling, every kind of bad input."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.sparse import csr_array
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from tiny_text import (  # noqa: E402
    SENTENCES,
    WORDS,
    tiny_bert,
    tiny_text_settings,
    tiny_tokenizer,
    tiny_vision_settings,
)

import ncl_multi as ncl  # noqa: E402
from ncl_multi import data  # noqa: E402
from ncl_multi.adapters.sentence.encoder import Encoder, pool  # noqa: E402
from ncl_multi.adapters.sentence.model import NonNegEncoder  # noqa: E402
from ncl_multi.data import towers  # noqa: E402


@pytest.fixture
def bert_folder(tmp_path):
    tiny_bert().save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ncl.wrap(tiny_bert(), 64, processor=tiny_tokenizer())


def image_processor():
    return transformers.ViTImageProcessor(size={"height": 16, "width": 16})


def by_hand(bert, sentence, pooling):
    """One sentence, no padding, no batch."""
    inputs = tiny_tokenizer()([sentence], return_tensors="pt")
    h = bert(**inputs).last_hidden_state[0]
    return {"mean": h.mean(dim=0), "cls": h[0], "last": h[-1]}[pooling]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_pools_like_one_sentence_alone(pooling, side):
    bert, tokenizer = tiny_bert(), tiny_tokenizer()
    tokenizer.padding_side = side
    model = ncl.wrap(bert, 8, pooling=pooling, processor=tokenizer)
    if side == "left":
        # Absolute positions shift with left padding, so the pooling is checked on the model's
        # output instead.
        inputs = model.encoder.prepare(SENTENCES)
        out, mask = bert(**inputs), inputs["attention_mask"]
        for got, h, kept in zip(pool(out, mask, pooling), out[0], mask.bool(), strict=True):
            h = h[kept]
            want = {"mean": h.mean(dim=0), "cls": h[0], "last": h[-1]}[pooling]
            torch.testing.assert_close(got, want)
        return
    got = model.embed(SENTENCES, progress=False)
    want = torch.stack([by_hand(bert, sentence, pooling) for sentence in SENTENCES])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_codes_are_unit_rows_of_the_head_in_the_order_given(model):
    model.head.train()
    model.head(torch.randn(50, 32))
    codes = model.encode(SENTENCES, progress=False)
    assert isinstance(codes, csr_array)
    h = model.embed(SENTENCES, progress=False)
    want = F.normalize(model.eval().head(h), dim=1)
    torch.testing.assert_close(torch.from_numpy(codes.toarray()), want, rtol=1e-5, atol=1e-6)
    assert codes.data.min() > 0


def test_any_iterable_in_any_batching_gives_the_same_codes(model):
    model.window = 2
    want = model.encode(SENTENCES, dense=True, progress=False)
    for items in (
        (sentence for sentence in SENTENCES),
        np.array(SENTENCES),
        dict.fromkeys(SENTENCES),
    ):
        got = model.encode(items, dense=True, batch_size=2, progress=False)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_generator_is_read_one_window_at_a_time(model, monkeypatch):
    model.window = 1
    read, ahead = [], []

    def sentences():
        for number in range(8):
            read.append(number)
            yield SENTENCES[number % len(SENTENCES)]

    encoder_forward = model.encoder.forward
    monkeypatch.setattr(
        model.encoder,
        "forward",
        lambda inputs: (ahead.append(len(read)), encoder_forward(inputs))[1],
    )
    assert model.encode(sentences(), batch_size=2, progress=False).shape == (8, 64)
    assert ahead == [2, 4, 6, 8]


def test_a_stream_gives_the_codes_a_window_at_a_time(model):
    model.window = 2
    parts = list(model.stream(iter(SENTENCES), k=5, batch_size=2, progress=False))
    assert [part.shape[0] for part in parts] == [4, 2]
    whole = model.encode(SENTENCES, k=5, progress=False).toarray()
    np.testing.assert_allclose(np.vstack([p.toarray() for p in parts]), whole, atol=1e-6)
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.64"):
        next(model.stream(SENTENCES, k=65))


def test_a_datasets_column_is_encoded(model):
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"text": SENTENCES})["text"]
    assert model.encode(column, progress=False).shape == (len(SENTENCES), 64)


def test_k_keeps_the_largest_entries_of_a_unit_row(model):
    codes = model.encode(SENTENCES, k=5, progress=False)
    whole = model.encode(SENTENCES, dense=True, progress=False)
    want = F.normalize(ncl.top_k(whole, 5), dim=1)
    torch.testing.assert_close(torch.from_numpy(codes.toarray()), want)
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.64"):
        model.encode(SENTENCES, k=65)


def test_a_query_may_have_more_entries_than_the_head_keeps(model):
    whole = model.encode(SENTENCES, dense=True)
    model.head.k = 5
    got = model.encode(SENTENCES, k=9, dense=True)
    torch.testing.assert_close(got, F.normalize(ncl.top_k(whole, 9), dim=1))
    assert int((model.encode(SENTENCES, dense=True) > 0).sum(dim=1).max()) == 5


@pytest.mark.parametrize("k", [None, 5])
def test_queries_are_the_head_before_its_activation(model, k):
    whole = model.encode(SENTENCES, dense=True)
    model.head.k = k
    queries = torch.from_numpy(model.queries(SENTENCES).toarray())
    assert bool((queries < 0).any())
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(len(SENTENCES)))
    torch.testing.assert_close(F.normalize(queries.relu(), dim=1), whole)
    assert model.queries([]).shape == (0, 64)


def test_encoding_leaves_the_training_mode_as_it_was(model):
    model.train()
    model.encode(SENTENCES, progress=False)
    assert model.training
    with pytest.raises(ValueError, match="row 0"):
        model.encode([None], progress=False)
    assert model.training


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["a", "cat", None], "row 2 is NoneType"),
        (["a", 3], "row 1 is int"),
        ([b"a"], "row 0 is bytes"),
        (["a", float("nan")], "row 1 is float"),
        (["a", "\ud800"], "row 1 is not valid Unicode"),
        ("the cat", "put it in a list"),
    ],
)
def test_what_is_no_sentence_is_refused_with_its_row(model, items, message):
    with pytest.raises(ValueError, match=message):
        model.encode(items, progress=False)


def test_strange_sentences_are_encoded(model):
    strange = ["", " ", "cat " * 250_000, "x" * 1_000_000, "😀 зима 猫", "\x00"]
    codes = model.encode(strange, dense=True, progress=False)
    assert codes.shape == (6, 64)
    assert codes.isfinite().all()


def test_no_sentence_gives_no_code(model):
    assert model.encode([], progress=False).shape == (0, 64)
    assert model.encode([], dense=True, progress=False).shape == (0, 64)
    assert model.embed([], progress=False).shape == (0, 32)


def test_an_encoder_that_gives_nan_is_refused_with_the_row(model, monkeypatch):
    forward = model.encoder.forward

    def broken(inputs):
        h = forward(inputs).clone()
        h[inputs["attention_mask"].sum(dim=1) == 4] = float("nan")
        return h

    monkeypatch.setattr(model.encoder, "forward", broken)
    with pytest.raises(ValueError, match="NaN or infinity for row 3"):
        model.encode(SENTENCES, progress=False)


def test_a_saved_model_gives_the_same_codes(model, tmp_path):
    model.head(torch.randn(50, 32))
    model.save_pretrained(tmp_path / "saved")
    again = NonNegEncoder.from_pretrained(tmp_path / "saved")
    assert not again.training
    got = again.encode(SENTENCES, dense=True, progress=False)
    torch.testing.assert_close(got, model.encode(SENTENCES, dense=True, progress=False))
    assert "arxiv.org/abs/2403.12459" in (tmp_path / "saved" / "README.md").read_text()


def test_a_sentence_transformers_model_keeps_its_own_pooling(bert_folder, tmp_path):
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    stock = st.SentenceTransformer(
        modules=[Transformer(str(bert_folder)), Pooling(32, "cls"), Normalize()], device="cpu"
    )
    stock.save_pretrained(str(tmp_path / "stock"))
    want = stock.encode(SENTENCES, convert_to_tensor=True)
    for source in (tmp_path / "stock", stock):
        model = ncl.wrap(source, 16)
        assert model.encoder.pooling == "own"
        torch.testing.assert_close(model.embed(SENTENCES, progress=False), want)
    model.save_pretrained(tmp_path / "saved")
    again = NonNegEncoder.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again.embed(SENTENCES, progress=False), want)
    other = ncl.wrap(tmp_path / "stock", 16, pooling="mean")
    assert not torch.allclose(other.embed(SENTENCES, progress=False), want, atol=1e-3)


def test_wordllama_is_the_mean_of_its_token_vectors(tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("NCL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    table = torch.randn(len(WORDS) + 4, 16).half()
    package = tmp_path / "wordllama"
    for name in ("weights", "tokenizers"):
        (package / name).mkdir(parents=True)
    save_file({"embedding.weight": table}, package / "weights/l2_supercat_256.safetensors")
    tokenizer = package / "tokenizers/l2_supercat_tokenizer_config.json"
    tiny_tokenizer().backend_tokenizer.save(str(tokenizer))
    monkeypatch.setattr(towers, "unpacked", lambda *_: tmp_path)
    model = ncl.wrap(data.wordllama(), 8)
    ids = [[WORDS.index(word) + 4 for word in sentence.split()] for sentence in SENTENCES]
    want = torch.stack([table[row].float().mean(dim=0) for row in ids])
    torch.testing.assert_close(model.embed(SENTENCES), want)
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(ncl.load(tmp_path / "saved").embed(SENTENCES), want)
    with pytest.raises(ValueError, match="cannot load an encoder"):
        ncl.wrap(data.wordllama(), 8, pooling="mean")


def test_a_decoder_is_read_at_its_last_token():
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=32,
        bos_token_id=2,
        eos_token_id=3,
    )
    config.architectures = ["GPT2LMHeadModel"]
    gpt = transformers.GPT2Model(config)
    gpt.config.architectures = ["GPT2ForCausalLM"]
    assert ncl.wrap(gpt, 8, processor=tiny_tokenizer()).encoder.pooling == "last"


def test_a_folder_is_loaded_by_its_config(bert_folder):
    model = ncl.wrap(str(bert_folder), 8)
    assert (model.encoder.tower, model.encoder.pooling, model.encoder.width) == ("text", "mean", 32)


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_an_image_encoder_gives_its_class_token(kind):
    torch.manual_seed(0)
    settings = tiny_vision_settings()
    if kind == "Dinov2":
        settings.pop("intermediate_size")
    config = getattr(transformers, f"{kind}Config")(**settings)
    vision = getattr(transformers, f"{kind}Model")(config).eval()
    model = ncl.wrap(vision, 8, processor=image_processor())
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (20, 24, 3), dtype=np.uint8) for _ in range(3)]
    pixels = image_processor()(images=images, return_tensors="pt").pixel_values
    want = vision(pixel_values=pixels).last_hidden_state[:, 0]
    torch.testing.assert_close(model.embed(images, progress=False), want)
    assert model.encode(images, progress=False).shape == (3, 8)


def test_clip_is_wrapped_one_tower_at_a_time():
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=tiny_text_settings(), vision_config=tiny_vision_settings(), projection_dim=24
    )
    clip = transformers.CLIPModel(config).eval()
    with pytest.raises(ValueError, match="tower='text' or tower='image'"):
        ncl.wrap(clip, 8)
    text = ncl.wrap(clip, 8, tower="text", processor=tiny_tokenizer())
    image = ncl.wrap(clip, 8, tower="image", processor=image_processor())
    assert text.encoder.width == image.encoder.width == 24
    assert text.encode(SENTENCES, progress=False).shape == (6, 8)
    picture = np.zeros((16, 16, 3), dtype=np.uint8)
    assert image.encode([picture], progress=False).shape == (1, 8)


def test_a_clip_tower_on_its_own_gives_its_pooled_output():
    config = transformers.CLIPVisionConfig(**tiny_vision_settings())
    vision = transformers.CLIPVisionModel(config).eval()
    model = ncl.wrap(vision, 8, processor=image_processor())
    assert (model.encoder.tower, model.encoder.pooling) == ("image", "pooler")


def test_what_is_no_image_is_refused_with_its_row(tmp_path):
    vision = transformers.ViTModel(transformers.ViTConfig(**tiny_vision_settings()))
    model = ncl.wrap(vision, 8, processor=image_processor())
    good = np.zeros((16, 16, 3), dtype=np.uint8)
    (tmp_path / "text.png").write_text("no image")
    for bad in (None, 3, np.zeros((4, 4)), tmp_path / "text.png"):
        with pytest.raises(ValueError, match=r"row 1 is (no|not an) image"):
            model.encode([good, bad], progress=False)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the folder does not contain a model"):
        ncl.wrap(tmp_path)
    with pytest.raises(ValueError, match="does not contain a model written by save_pretrained"):
        NonNegEncoder.from_pretrained(tmp_path)


def test_a_head_of_another_width_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="the head takes 48 features, this encoder gives 32"):
        NonNegEncoder(model.encoder, ncl.NonNegHead(48, 8))
    model.save_pretrained(tmp_path / "saved")
    tiny_bert(width=48).save_pretrained(tmp_path / "saved" / "encoder")
    with pytest.raises(ValueError, match="this encoder gives 48"):
        NonNegEncoder.from_pretrained(tmp_path / "saved")


def test_wrong_options_say_what_is_known(bert_folder, unchecked):
    with pytest.raises(ValueError, match="pooling must be one of mean, cls"):
        ncl.wrap(bert_folder, pooling="median")
    with pytest.raises(ValueError, match="reads texts; got tower='image'"):
        ncl.wrap(bert_folder, tower="image")
    with pytest.raises(ValueError, match="give one as processor="):
        ncl.wrap(tiny_bert())
    with pytest.raises(ValueError, match="must come from transformers"):
        ncl.wrap(nn.Linear(3, 3))


def test_a_forward_runs_on_a_gpu_that_is_not_there():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = ncl.wrap(tiny_bert(), 16, processor=tiny_tokenizer()).eval()
    inputs = model.encoder.prepare(SENTENCES)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        on_gpu = {name: fake.from_tensor(part).to("cuda") for name, part in inputs.items()}
        for module in model.modules():
            for name, part in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(fake.from_tensor(part).to("cuda")))
            for name, part in list(module.named_buffers(recurse=False)):
                setattr(module, name, fake.from_tensor(part).to("cuda"))
        for pooling in ("mean", "cls", "last"):
            model.encoder.pooling = pooling
            assert model(on_gpu).device.type == "cuda"


def test_an_encoder_can_be_loaded_without_a_head(bert_folder):
    assert Encoder.load(bert_folder).width == 32
