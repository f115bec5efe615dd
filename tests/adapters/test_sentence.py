"""Sentences: the objective by hand, what is read, what is compared, and models for elsewhere."""

import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from scipy.sparse import csr_array
from tiny_text import SENTENCES, tiny_bert, tiny_tokenizer
from torch import nn
from torch.nn import functional as F

pytest.importorskip("sentence_transformers")

import ncl_multi as ncl
from ncl_multi.adapters.sentence.config import SentenceConfig
from ncl_multi.adapters.sentence.corpus import Corpus, Examples, passages_of
from ncl_multi.adapters.sentence.data import (
    held_out,
    plain,
    read_corpus,
    read_examples,
)
from ncl_multi.adapters.sentence.export import (
    export_onnx,
    export_sentence_transformers,
)
from ncl_multi.adapters.sentence.model import _for_few_entries, both_directions
from ncl_multi.adapters.sentence.objective import (
    NonNegLoss,
    SentenceObjective,
    SparseAutoencoder,
    at_each_k,
    contrast,
)
from ncl_multi.adapters.sentence.report import (
    Method,
    TextBenchmarks,
    baselines,
    principal_axes,
    quality,
)
from ncl_multi.data import stsb
from ncl_multi.head import sparse_axes
from ncl_multi.losses import correlation_loss, imitation
from ncl_multi.training.neighbours import Neighbours, nearest

# What the libraries say about themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:# The axis name"),
    # torch 2.12 copies a class of its own that it deprecates, in its export to ONNX.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]


def rows(seed, n=6, d=5):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tiny_model(**options):
    torch.manual_seed(0)
    model = ncl.wrap(tiny_bert(), 64, processor=tiny_tokenizer(), **options)
    model.head(torch.randn(50, 32) + 1)
    return model.eval()


def test_agree_is_one_minus_pearsons_correlation():
    za, zb, ha, hb = (rows(seed) for seed in range(4))
    got = [
        float(F.normalize(a, dim=0) @ F.normalize(b, dim=0)) for a, b in zip(za, zb, strict=True)
    ]
    want = [
        float(F.normalize(a, dim=0) @ F.normalize(b, dim=0)) for a, b in zip(ha, hb, strict=True)
    ]
    by_hand = 1 - torch.corrcoef(torch.tensor([got, want]))[0, 1].item()
    assert correlation_loss(za, zb, F.cosine_similarity(ha, hb)).item() == pytest.approx(
        by_hand, rel=1e-6
    )


def test_agree_does_not_see_scale_and_offset_of_cosines():
    h = torch.eye(4, dtype=torch.float64)
    far = F.normalize(h + 3, dim=1)
    pairs = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 3, 2])
    wanted = torch.tensor([5.0, 5.0, 1.0, 1.0])
    assert correlation_loss(far[pairs[0]], far[pairs[1]], wanted).item() == pytest.approx(0)


def test_agree_of_pairs_without_spread_has_finite_gradients():
    za = torch.zeros(3, 4, requires_grad=True)
    correlation_loss(za, torch.zeros(3, 4), torch.ones(3)).backward()
    assert za.grad.isfinite().all()


def test_nearest_are_the_largest_cosines_except_the_row_itself():
    h = rows(2)
    near = nearest(h, 3)
    cosines = F.cosine_similarity(h[:, None], h[None], dim=2)
    for i, found in enumerate(near.tolist()):
        others = sorted((j for j in range(len(h)) if j != i), key=lambda j: -cosines[i, j].item())
        assert found == others[:3]
    assert nearest(h, 99).shape == (len(h), len(h) - 1)


def test_the_nearer_a_neighbour_the_likelier_it_is_drawn():
    torch.manual_seed(0)
    # Row 0 looks along the first axis, the others turn away from it by and by.
    angle = torch.linspace(0, 1.5, 65)
    h = torch.stack([angle.cos(), angle.sin()], dim=1)
    found = Neighbours(h, 64).of(torch.zeros(20_000, dtype=torch.long))
    shares = torch.bincount(found - 1, minlength=64) / len(found)
    # rank = 64^u, so that a rank r is drawn with probability log(1 + 1/r) / log(64).
    assert shares[0].item() == pytest.approx(1 / 6, abs=0.02)
    assert shares[15].item() == pytest.approx(math.log(17 / 16) / math.log(64), abs=0.01)


def test_documents_are_paired_with_their_own_sentences():
    text = "One sentence of five words. Short. Another sentence of five words? Yes."
    texts = [text, "The second document is one sentence"]
    corpus = Corpus.of(texts, passages=True)
    shown = [[corpus.sentences[i] if i >= 0 else None for i in row] for row in corpus.examples]
    assert shown == [
        ["One sentence of five words.", text],
        ["Another sentence of five words?", text],
        [texts[1], None],
    ]
    assert len(passages_of("One sentence of five words. " * 40)) == 4


def test_texts_of_three_sentences_are_taken_for_documents():
    long = [
        f"Number {i} has five words. So has this other one. And this is the last." for i in "abc"
    ]
    assert Corpus.of(long).examples.shape == (9, 2)
    assert Corpus.of(long, passages=False).examples.shape == (3, 1)
    assert Corpus.of([long[0], "short", "shorter"]).examples.shape == (3, 1)


def test_documents_longer_than_the_window_are_read_in_passages():
    model = tiny_model()
    words = " ".join(SENTENCES).replace(".", "").split()
    long, window = " ".join(words * 8), model.encoder.window
    parts = model.encoder.passages(long)
    assert " ".join(parts).split() == long.split()
    tokens = [len(model.encoder.processor(part)["input_ids"]) for part in parts]
    assert len(parts) > 1
    assert max(tokens) <= window
    h = model.embed([long, words[0], *parts])
    mean = F.normalize(h[2:].mean(dim=0), dim=0)
    torch.testing.assert_close(F.normalize(h[0], dim=0), mean)
    torch.testing.assert_close(h[0].norm(), h[2:].norm(dim=1).mean())
    torch.testing.assert_close(h[1:2], model.embed([words[0]]))


def test_what_nobody_has_given_is_mined():
    torch.manual_seed(0)
    h = rows(0, 6, 4)
    config = SentenceConfig(mined=1.0, mined_among=2)
    near = nearest(h, 2)
    batch = torch.tensor([[0, -1, -1], [1, 5, -1], [2, 3, 4]])
    anchors, positives, negatives = Examples(h, config).columns(batch)
    assert anchors.tolist() == [0, 1, 2]
    assert positives[0] in near[0]
    assert positives[1:].tolist() == [5, 3]
    assert negatives.tolist() == [positives[0].item(), 5, 4]
    alone = Examples(h, SentenceConfig(mined=0.0)).columns(torch.tensor([[0], [1]]))
    assert [column.tolist() for column in alone] == [[0, 1], [0, 1]]


def test_your_own_texts_are_all_trained_on(tmp_path):
    judged = stsb("test")[0][0]
    (tmp_path / "texts.csv").write_text(f'text\na small cat\na small dog\n"{judged}"\n')
    corpus = read_corpus(str(tmp_path / "texts.csv"), None, "stsb")
    assert corpus.sentences[:3] == ["a small cat", "a small dog", judged]
    others = {plain(s) for split in ("dev", "test") for side in stsb(split)[:2] for s in side}
    assert not others & set(map(plain, corpus.sentences[3:]))
    assert len(corpus.pairs) == len(corpus.scores) > 4000


def test_broad_texts_have_no_sentence_that_is_judged_or_held_out():
    corpus = read_corpus("broad", 800)
    given = (corpus.examples >= 0).sum(dim=1)
    entries, pairs, triplets = torch.bincount(given)[1:].tolist()
    assert entries >= 340
    assert 590 <= entries + pairs <= 600
    assert 190 < triplets <= 200
    words = [len(corpus.sentences[row].split()) for row in corpus.examples[given == 2][100:, 1]]
    assert min(words) >= 20  # an abstract
    judged = {plain(s) for split in ("dev", "test") for side in stsb(split)[:2] for s in side}
    assert not judged & set(map(plain, corpus.sentences))
    assert not set(held_out()[0]) & set(corpus.sentences)


def test_contrast_does_not_push_an_anchor_from_a_text_that_is_its_own_too():
    za, zb = rows(0), rows(1)
    zb[1] = zb[0]
    same = torch.tensor([7, 7, 2, 3, 4, 5])
    got = contrast([za, zb], temperature=0.1, groups=same)
    assert got == ncl.info_nce(za, zb, temperature=0.1, groups=same)
    assert got < contrast([za, zb], temperature=0.1)


def test_contrast_of_pairs_is_info_nce():
    za, zb = rows(0), rows(1)
    assert contrast([za, zb], temperature=0.1) == ncl.info_nce(za, zb, temperature=0.1)


def test_a_hard_negative_near_its_anchor_costs_more():
    za, far = torch.eye(8)[:4], torch.eye(8)[4:]
    near = za + 0.3 * far
    cost = [contrast([za, za, negatives], temperature=0.1).item() for negatives in (near, far)]
    assert cost[0] > cost[1]


def test_codes_are_cut_to_each_k():
    z = rows(0)
    cut = at_each_k(z, (1, 3))
    assert [int((part > 0).sum(dim=1).max()) for part in cut] == [1, 3]
    assert at_each_k(z, None)[0] is z


def test_k_comes_down_over_the_first_seventy_percent():
    corpus = Corpus.of(SENTENCES)
    config = SentenceConfig(anneal_k=4.0)
    learner = SentenceObjective(ncl.NonNegHead(4, 64), corpus, torch.rand(6, 4), (4,), config)
    seen = []
    for progress in (0.0, 0.35, 0.7, 1.0):
        learner.anneal(progress)
        seen.append(learner.k)
    assert seen == [16, 8, 4, 4]


def objective(corpus, h, ks=(2, 4), **options):
    """An objective without dropout on a head that is not trained."""
    torch.manual_seed(0)
    still = {"dropout": 0.0, "contrast": 0.0, "correlation": 0.0, "imitation": 0.0}
    head = ncl.NonNegHead(h.shape[1], 16).double()
    return SentenceObjective(head, corpus, h, ks, SentenceConfig(**still | options))


def test_the_objective_cuts_to_each_k_in_turn_and_sums_its_terms():
    corpus = Corpus.of([("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i"), ("j", "k", "l")])
    h, batch = rows(0, 12, 8), corpus.examples
    made = objective(corpus, h, contrast=2.0, reconstruction=0.5)
    made.double()
    for k in (2, 4, 2):
        assert made.k == k
        loss, z = made(batch)
        cut = ncl.top_k(z, k)
        columns, texts = cut.chunk(3), batch[:, 1:].T.flatten()
        by_hand = 2.0 * contrast(columns, temperature=0.1, groups=texts)
        rebuilt = made.rebuild(cut)
        by_hand = by_hand + 0.5 * (rebuilt - h[batch.T.flatten()]).square().mean()
        assert loss.item() == pytest.approx(by_hand.item(), rel=1e-9)


def test_single_sentences_are_contrasted_with_a_noisy_copy():
    corpus = Corpus.of(SENTENCES)
    made = objective(corpus, rows(0, 6, 8), contrast=1.0, dropout=0.3)
    loss, z = made(corpus.examples)
    assert len(z) == 12
    assert not torch.equal(z[:6], z[6:])
    assert loss.isfinite()


def test_scores_and_the_encoders_cosines_are_correlations():
    scored = [(("a", "b"), 5.0), (("a", "c"), 1.0), (("b", "c"), 2.0)]
    corpus = Corpus.of([("a", "b"), ("c", "d")], scored)
    h = rows(0, 4, 8)
    torch.manual_seed(1)
    made = objective(corpus, h, ks=None, scores=0.7)
    torch.manual_seed(2)
    loss, z = made(corpus.examples)
    torch.manual_seed(2)
    _, _, scores = corpus.draw_pairs(4)
    left, right = z[4:8], z[8:12]
    assert loss.item() == pytest.approx(
        0.7 * correlation_loss(left, right, scores).item(), rel=1e-6
    )


def test_positives_are_near_short_and_whole_anchors_as_the_encoder_says():
    corpus, h = Corpus.of([("a", "b"), ("c", "d"), ("e", "f")]), rows(0, 6, 8)
    loss, z = objective(corpus, h, ks=(3,), imitation=2.0)(corpus.examples)
    (whole, cut), teacher = (z[:3], ncl.top_k(z[3:], 3)), h[corpus.examples.T]
    by_hand = sum(
        imitation((anchors, cut), tuple(teacher), 0.05) for anchors in (ncl.top_k(whole, 3), whole)
    )
    assert loss.item() == pytest.approx(2.0 * by_hand.item(), rel=1e-9)


def test_cosines_of_an_example_and_of_any_two_anchors_follow_the_encoder():
    corpus, h = Corpus.of([("a", "b", "c"), ("d", "e", "f")]), rows(0, 6, 8)
    loss, z = objective(corpus, h, ks=None, correlation=1.0)(corpus.examples)
    pairs = [(0, 2), (1, 3), (0, 4), (1, 5), (0, 1), (1, 0)]
    left, right = torch.tensor(pairs).T
    texts = h[corpus.examples.T.flatten()]
    cosines = F.cosine_similarity(texts[left], texts[right])
    by_hand = correlation_loss(z[left], z[right], cosines)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-9)


def test_the_encoder_is_trained_if_asked_for():
    model = tiny_model()
    before = model.encoder.model.embeddings.word_embeddings.weight.clone()
    model.fit(SENTENCES * 2, finetune=True, steps=2, batch_size=3, device="cpu", ema=None)
    assert not torch.equal(model.encoder.model.embeddings.word_embeddings.weight, before)


@pytest.mark.parametrize(
    ("examples", "complaint"),
    [
        ([], "needs a list of texts"),
        ("one text", "needs a list of texts"),
        (["one"], "at least two examples"),
        (["a", ("b", "c")], "row 1 has 2"),
        (["same", "same"], "texts that differ; all are 'same'"),
        ([("same", "same")] * 3, "texts that differ"),
        (["a", 5], "row 1 must be a text"),
        ([("a", "b"), ("a", "")], "row 1 has an entry that is not text"),
    ],
)
def test_examples_that_do_not_fit_are_refused_with_their_row(examples, complaint, unchecked):
    with pytest.raises(ValueError, match=complaint):
        Corpus.of(examples)


def test_the_loss_trains_a_stock_model_through_its_own_name():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense

    from ncl_multi.adapters.sentence.export import stock_modules

    modules = [*stock_modules(tiny_model())[:2], Dense(32, 16, activation_function=nn.ReLU())]
    loss = NonNegLoss(SentenceTransformer(modules=modules, device="cpu"), ks=(4, 8))
    columns = [loss.model.preprocess(SENTENCES[:2]), loss.model.preprocess(SENTENCES[2:4])]
    loss(columns).backward()
    assert modules[-1].linear.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="needs an anchor and a positive"):
        loss(columns[:1])


def test_csr_trains_and_gives_non_negative_codes():
    torch.manual_seed(0)
    csr = SparseAutoencoder(8, 32, k=4)
    loss, z = csr([torch.randn(6, 8) for _ in range(3)])
    loss.backward()
    assert int((z > 0).sum(dim=1).max()) <= 4
    assert csr.body.encoder.weight.grad.isfinite().all()
    assert (csr.codes(torch.randn(6, 8)) >= 0).all()


def test_csr_is_trained_on_the_same_examples_for_as_many_steps(tmp_path, capsys):
    model, corpus = tiny_model(), Corpus.of([(a, b) for a in SENTENCES for b in SENTENCES])
    config = SentenceConfig(out=tmp_path, k=(4, 8), steps=3, batch_size=12, device="cpu")
    methods = baselines(model, corpus, config, 1e-3)
    assert list(methods) == ["pca", "csr@4", "csr@8"]
    code, weights = methods["csr@4"]
    h = torch.randn(3, 32)
    assert torch.equal(code(h), weights(h).relu())
    assert json.loads((tmp_path / "csr/8/config.json").read_text())["steps"] == 3


def test_principal_axes_are_those_of_the_largest_variance():
    h = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 9, 3])
    mean, axes = principal_axes(h + 5, 2)
    assert axes.abs().argmax(dim=0).tolist() == [1, 2]
    torch.testing.assert_close(mean, (h + 5).mean(dim=0))


def test_examples_are_read_from_csv_and_jsonl_and_described(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("id,anchor,positive\n1,a cat,the cat\n2,a dog,the dog\n")
    lines = [
        {"x": "a", "y": "b", "z": "c", "score": 1},
        {"x": "d", "y": "e", "z": "f", "score": 0},
        {"x": "g", "y": "", "z": "h", "score": 0},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_examples(tmp_path / "a.csv") == [("a cat", "the cat"), ("a dog", "the dog")]
    examples = read_examples(tmp_path / "b.jsonl", ["x", "y", "z"])
    assert examples == [("a", "b", "c"), ("d", "e", "f")]
    output = capsys.readouterr().err
    assert "2 rows, columns anchor, positive\n  example, line 2: 'a cat' | 'the cat'" in output
    assert "left out 1: y is empty (line 3)" in output
    assert "every row counts as a match, whatever its score" in output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "anchor,positive\nx,y\nz\n", "line 3 has 1 cells"),
        ("a.csv", "anchor,positive\n", "has no rows"),
        ("a.jsonl", '{"n": 1}', "no column contains text"),
        ("a.jsonl", '{"x": "a"}\n{"x"', "line 2 of .* is not JSON"),
        ("a.jsonl", "\x00\udcff", "not a text file"),
        ("a.csv", "id,x,y\n1,a b,c d\n", "columns x, y contain text; choose with --columns"),
        ("a.doc", "x", "must end in .csv, .tsv, .jsonl"),
    ],
)
def test_bad_examples_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"does not exist. Known names are broad"):
        read_examples(tmp_path / "missing.csv")
    with pytest.raises(ValueError, match="one to three columns"):
        read_examples(tmp_path / name, ["a", "b", "c", "d"])


def test_sentences_are_the_same_without_case_and_punctuation():
    assert plain("A man, playing.") == plain("a MAN playing")


def test_short_codes_are_compared_with_the_whole():
    z = torch.rand(30, 16, generator=torch.Generator().manual_seed(0))
    noisy = z + 0.1 * torch.rand(30, 16, generator=torch.Generator().manual_seed(1))
    relevant = csr_array(torch.eye(30).numpy())
    pairs = {"own_test": (z, noisy, F.cosine_similarity(z, noisy))}
    judged = TextBenchmarks(pairs, {"texts": (z, noisy, relevant)})
    ours = Method(lambda h: h, lambda h: h - 0.5)
    figures = quality(judged, {"ours": ours, "fixed@4": Method(lambda h: h)}, (4, 16))
    assert figures["dense"]["test"]["own_spearman"] == pytest.approx(1, abs=1e-3)
    assert figures["ours@16"]["test"]["own_spearman"] == pytest.approx(1, abs=1e-3)
    ours, truncated = figures["ours@4"]["test"], figures["truncated@4"]["test"]
    assert ours["own_spearman"] < 1
    assert (ours["bytes"], truncated["bytes"]) == (24, 16)
    assert [name for name in figures if name.startswith("fixed")] == ["fixed@4"]
    by_hand = ncl.metrics.ndcg_at_k(z, ncl.top_k(noisy, 4), relevant)
    assert ours["texts_ndcg_at_10_whole_query"] == pytest.approx(by_hand)
    by_hand = ncl.metrics.ndcg_at_k(z - 0.5, ncl.top_k(noisy, 4), relevant)
    assert ours["texts_ndcg_at_10_signed_query"] == pytest.approx(by_hand)
    assert "texts_ndcg_at_10_whole_query" not in truncated


@pytest.mark.parametrize("dims", [16, 6])
def test_a_head_started_on_both_directions_keeps_the_leading_principal_axes(dims):
    h = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9) + 3
    head, mean = ncl.NonNegHead(8, dims, batch_norm=False), h.mean(dim=0)
    directions = both_directions(h - mean, dims)
    head.start_at(directions)
    head.centre_on(mean)
    # What the directions say, put together again, is a multiple of the centred features, along
    # axes that count by the root of the root of one over their variance.
    rebuilt = head.train()(h) @ directions
    _, leading = principal_axes(h, dims // 2)
    scaled = (h - mean) @ leading * ((h - mean) @ leading).var(dim=0) ** -0.25
    cosines = F.cosine_similarity(rebuilt, scaled @ leading.T)
    torch.testing.assert_close(cosines, torch.ones(200), rtol=1e-4, atol=1e-4)
    assert both_directions(h - mean, 1).shape == (1, 8)
    equal_rows = torch.zeros(20, 8)
    assert both_directions(equal_rows, dims).isfinite().all()


def test_few_entries_contain_more_of_a_row_on_turned_axes():
    torch.manual_seed(0)
    x = F.normalize(torch.randn(400, 24).pow(3), dim=1)
    mixed = x @ torch.linalg.qr(torch.randn(24, 24))[0]
    before = sparse_axes(mixed, steps=1)
    after = _for_few_entries(mixed, before)
    torch.testing.assert_close(after @ after.T, torch.eye(24), rtol=1e-4, atol=1e-4)
    few = [(mixed @ axes.T).square().topk(8).values.sum(dim=1).mean() for axes in (before, after)]
    assert few[1] > few[0] + 0.01


def test_the_stock_export_needs_nothing_of_ours(tmp_path):
    for name, options in (("plain", {}), ("cut", {"k": 8}), ("deep", {"k": 8, "hidden_dim": 24})):
        model = tiny_model(**options)
        export_sentence_transformers(model, tmp_path / name)
        torch.save(model.encode(SENTENCES, dense=True), tmp_path / f"{name}.pt")
    code = f"""
        import sys
        sys.modules["ncl_multi"] = None
        import torch
        from sentence_transformers import SentenceTransformer, SparseEncoder
        for name in ("plain", "cut", "deep"):
            folder = {str(tmp_path)!r} + "/" + name
            want = torch.load(folder + ".pt")
            dense = SentenceTransformer(folder, device="cpu").encode({SENTENCES!r})
            sparse = SparseEncoder(folder + "/sparse_encoder", device="cpu").encode({SENTENCES!r})
            for got in (torch.from_numpy(dense), sparse.to_dense()):
                assert (got - want).abs().max() <= 1e-6, (name, (got - want).abs().max())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_an_export_that_would_not_be_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no module for activation='exp'"):
        export_sentence_transformers(tiny_model(activation="exp"), tmp_path)


def test_the_onnx_graph_gives_the_models_codes_at_any_length(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = tiny_model(k=8)
    path = export_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = model.encoder.prepare(SENTENCES)
    wanted = {given.name for given in session.get_inputs()}
    (got,) = session.run(None, {n: part.numpy() for n, part in inputs.items() if n in wanted})
    want = model.encode(SENTENCES, dense=True, progress=False)
    torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-4, atol=1e-5)
