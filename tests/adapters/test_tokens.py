"""Codes of tokens against single tokens by hand, then training, saving and the stock export."""

import math

import pytest
import torch
from tiny_text import SENTENCES, tiny_bert, tiny_tokenizer
from torch.nn import functional as F

import ncl_multi as ncl
from ncl_multi.adapters.sentence.export import export_onnx, export_sentence_transformers
from ncl_multi.adapters.sentence.tokens import NonNegTokens, strongest

pytestmark = pytest.mark.filterwarnings("ignore:# The axis name")


@pytest.fixture
def model():
    made = ncl.wrap(tiny_bert(), 48, pooling="tokens", processor=tiny_tokenizer(), k=6)
    made.head.train()(torch.randn(50, 32))
    return made.eval()


def test_the_strongest_token_of_a_text_counts_by_its_logarithm():
    z = torch.rand(9, 4, dtype=torch.double)
    got, start = strongest(z, [2, 4, 3]), 0
    for row, count in enumerate([2, 4, 3]):
        for dim in range(4):
            most = max(float(z[token, dim]) for token in range(start, start + count))
            assert got[row, dim].item() == pytest.approx(math.log(1 + most), rel=1e-12)
        start += count


def test_a_code_is_made_of_the_tokens_of_its_text_alone(model):
    codes = model.encode(SENTENCES, dense=True)
    whole = model.head.fold()[:-1]
    for sentence, code in zip(SENTENCES, codes, strict=True):
        inputs = tiny_tokenizer()([sentence], return_tensors="pt")
        tokens = model.encoder.model(**inputs).last_hidden_state[0]
        want = ncl.top_k(whole(tokens).amax(dim=0, keepdim=True).log1p(), 6)
        torch.testing.assert_close(code[None], F.normalize(want, dim=1), rtol=1e-4, atol=1e-5)
    assert int((model.encode(SENTENCES, k=9, dense=True) > 0).sum(dim=1).max()) > 6


def test_a_long_text_has_the_largest_entries_of_its_passages(model):
    model.head.k = None
    long = " ".join(["the cat sat on the mat"] * 12)
    passages = model.encoder.passages(long)
    assert len(passages) > 1
    inputs = model.encoder.prepare(passages)
    with torch.no_grad():
        want = F.normalize(model(inputs).amax(dim=0, keepdim=True), dim=1)
    torch.testing.assert_close(model.encode([long], dense=True), want, rtol=1e-4, atol=1e-5)


def test_strange_sentences_are_encoded(model):
    strange = ["", " ", "cat " * 5_000, "x" * 10_000, "😀 зима 猫", "\x00"]
    assert model.encode(strange, dense=True).isfinite().all()
    assert model.encode([]).shape == (0, 48)
    with pytest.raises(ValueError, match="row 1 is NoneType"):
        model.encode(["a", None])


@pytest.mark.parametrize(("dims", "precision"), [(48, "fp32"), (80, "bf16")])
def test_it_is_trained_saved_and_loaded(dims, precision, tmp_path):
    model = ncl.wrap(tiny_bert(), dims, pooling="tokens", processor=tiny_tokenizer(), k=6)
    pairs = [(a, b) for a in SENTENCES for b in SENTENCES if a != b]
    options = {"steps": 3, "batch_size": 12, "device": "cpu", "progress": False}
    model.fit(pairs, out=tmp_path, precision=precision, **options)
    again = ncl.load(tmp_path)
    assert isinstance(again, NonNegTokens)
    codes = model.encode(SENTENCES, dense=True)
    torch.testing.assert_close(again.encode(SENTENCES, dense=True), codes)
    assert bool((codes >= 0).all())
    assert int((codes > 0).sum(dim=1).max()) == 6


@pytest.mark.parametrize("k", [None, 6])
def test_the_stock_export_has_the_same_cosines(model, k, tmp_path):
    sparse = pytest.importorskip("sentence_transformers").SparseEncoder
    model.head.k = k
    export_sentence_transformers(model, tmp_path)
    stock = sparse(str(tmp_path / "sparse_encoder"), device="cpu")
    got = F.normalize(stock.encode(SENTENCES).to_dense(), dim=1)
    torch.testing.assert_close(got, model.encode(SENTENCES, dense=True), rtol=1e-4, atol=1e-5)


def test_what_codes_of_tokens_cannot_do_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="have no signed form"):
        model.queries(SENTENCES)
    with pytest.raises(ValueError, match="have no ONNX graph"):
        export_onnx(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="frozen encoder, without finetune"):
        model.fit(SENTENCES * 2, finetune=True, steps=1, device="cpu")
    model.head.activation = "softplus"
    with pytest.raises(ValueError, match="linear layer and relu only"):
        export_sentence_transformers(model, tmp_path)
