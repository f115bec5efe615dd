"""SparseCoder: an estimator like others, codes that keep what embeddings know, safe files."""

import json
import math
import re

import joblib
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import ncl_multi as ncl
from ncl_multi.codes.engines import bulk_query, milvus_rows, milvus_vector, pgvector_literal
from ncl_multi.codes.explain import explain
from ncl_multi.codes.search import SparseIndex
from ncl_multi.data.shards import Shards

EXCEPTIONS = {
    "check_do_not_raise_errors_in_init_or_set_params": (
        "it passes without jaxtyping, which checks the types of arguments in tests only"
    ),
}


def kinds(rows=240, width=24, classes=6, seed=0):
    """Unit rows around a few centres, and the number of each row's centre."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    x = rng.standard_normal((classes, width))[y] + 0.5 * rng.standard_normal((rows, width))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), y


def small(**options):
    return ncl.SparseCoder(**{"dims": 48, "k": 6, "steps": 30, "random_state": 0} | options)


@pytest.fixture(scope="module")
def fitted():
    x, y = kinds()
    return small().fit(x), x, y


@parametrize_with_checks(
    [ncl.SparseCoder(dims=16, k=4, steps=2, random_state=0)],
    expected_failed_checks=lambda estimator: EXCEPTIONS,
)
def test_scikit_learn_takes_it_for_an_estimator(estimator, check):
    check(estimator)


def test_codes_are_sparse_unit_rows_with_at_most_k_entries(fitted):
    coder, x, _ = fitted
    for k in (1, 3, 6, 20):
        z = coder.transform(x, k=k)
        assert isinstance(z, csr_array)
        assert z.dtype == np.float32
        assert z.indices.dtype == z.indptr.dtype == np.int32
        assert np.diff(z.indptr).max() <= k
        assert z.data.min() > 0
        assert np.allclose(np.square(z.toarray()).sum(axis=1), 1, atol=1e-5)


def test_codes_are_the_largest_entries_of_the_head(fitted):
    coder, x, _ = fitted
    head = coder.heads_[0].double()
    with torch.no_grad():
        whole = head(torch.from_numpy(x).double()).numpy()
    head.float()
    for row, code in zip(whole, coder.transform(x, k=4).toarray(), strict=True):
        top_four = np.argsort(-row)[:4]
        expected = np.zeros(48)
        expected[top_four] = np.maximum(row[top_four], 0)
        assert np.allclose(code, expected / np.linalg.norm(expected), atol=1e-5)


def test_fewer_entries_are_those_of_more(fitted):
    coder, x, _ = fitted
    few, more = coder.transform(x, k=2).toarray(), coder.transform(x, k=8).toarray()
    assert ((few > 0) <= (more > 0)).all()


def test_rows_of_one_kind_have_codes_that_are_alike():
    x, y = kinds(seed=1)
    z = small().fit(x[:180]).transform(x[180:]).toarray()
    cosine = z @ z.T
    same = (y[180:, None] == y[None, 180:]) & ~np.eye(60, dtype=bool)
    assert cosine[same].mean() > cosine[~same].mean() + 0.3


def test_the_same_random_state_gives_the_same_codes():
    x, _ = kinds()
    torch.manual_seed(1)
    a = small(steps=3).fit_transform(x)
    before = torch.get_rng_state()
    b = small(steps=3).fit_transform(x)
    assert (a != b).nnz == 0
    assert torch.equal(before, torch.get_rng_state())
    assert (a != small(steps=3, random_state=1).fit_transform(x)).nnz > 0


def test_pairs_and_groups_bring_rows_together():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 16)).astype(np.float32)
    # What belongs together is not near: only the given pairs can tell.
    groups = np.arange(200) // 2
    pairs = np.stack([np.arange(0, 200, 2), np.arange(1, 200, 2)], axis=1)
    near = {}
    for name, given in {"groups": {"groups": groups}, "positives": {"positives": pairs}}.items():
        z = (
            small(steps=100, learning_rate=2e-2, temperature=0.1, imitation=0.0, noise=0.0)
            .fit(x, **given)
            .transform(x)
            .toarray()
        )
        near[name] = (z[::2] * z[1::2]).sum(axis=1).mean()
    z = (
        small(steps=100, learning_rate=2e-2, temperature=0.1, imitation=0.0, noise=0.0)
        .fit(x)
        .transform(x)
        .toarray()
    )
    alone = (z[::2] * z[1::2]).sum(axis=1).mean()
    assert near["groups"] > alone + 0.1
    assert near["positives"] > alone + 0.1


def test_partners_may_be_embeddings_too():
    x, _ = kinds()
    noisy = x + 0.1 * np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    coder = small(steps=5).fit(x, positives=noisy)
    assert coder.transform(noisy).shape == (240, 48)
    with pytest.raises(ValueError, match=r"must have the shape of the embeddings, \(240, 24\)"):
        small().fit(x, positives=noisy[:, :3])


def test_two_sides_share_one_space():
    x, y = kinds(seed=2)
    rng = np.random.default_rng(3)
    texts = (x @ rng.standard_normal((24, 15))).astype(np.float32)
    coder = small(steps=60).fit(x[:200], other=texts[:200])
    a, b = coder.transform(x[200:]), coder.transform(texts[200:], other=True)
    assert a.shape == b.shape
    right = y[200:][(a @ b.T).toarray().argmax(axis=1)] == y[200:]
    assert right.mean() > 0.8
    with pytest.raises(ValueError, match="15 features as input"):
        coder.transform(x, other=True)
    with pytest.raises(ValueError, match="one side only"):
        small(steps=1).fit(x).transform(texts, other=True)


def test_two_sides_may_be_linked_by_pairs():
    x, _ = kinds()
    pairs = np.stack([np.repeat(np.arange(40), 3), np.arange(120)], axis=1)
    coder = small(steps=2).fit(x[:40], other=x[:120, :9], positives=pairs)
    assert [head.in_dim for head in coder.heads_] == [24, 9]
    with pytest.raises(ValueError, match="Give positives as pairs"):
        small().fit(x[:40], other=x[:120, :9])
    with pytest.raises(ValueError, match=r"pair 0 is \[40, 0\]"):
        small().fit(x[:40], other=x[:120, :9], positives=pairs + np.array([40, 0]))


def test_the_decoder_rebuilds_embeddings_and_says_how_well(fitted):
    coder, x, _ = fitted
    fresh = kinds(rows=480)[0][240:]
    rebuilt = coder.inverse_transform(coder.transform(fresh))
    assert rebuilt.shape == fresh.shape
    error = np.square(rebuilt - fresh).sum() / np.square(fresh - x.mean(axis=0)).sum()
    assert 0 < coder.reconstruction_error_ < 1
    assert error == pytest.approx(coder.reconstruction_error_, abs=0.1)
    with pytest.raises(ValueError, match="48 dimensions; got 3"):
        coder.inverse_transform(np.ones((2, 3)))


def test_partial_fit_learns_on():
    x, _ = kinds(rows=600)
    coder = small(batch_size=32)
    for start in range(0, 600, 200):
        coder.partial_fit(x[start : start + 200])
    assert coder.n_rows_ == 600
    before = coder.heads_[0].out.weight.clone()
    coder.partial_fit(x[:64])
    assert not torch.equal(before, coder.heads_[0].out.weight)
    with pytest.raises(ValueError, match="not kept in files or by partial_fit"):
        coder.name(["a text"] * 664)


def test_it_works_in_a_pipeline_and_can_be_cloned():
    x, y = kinds()
    pipe = make_pipeline(StandardScaler(), small(), LogisticRegression())
    assert pipe.fit(x, y).score(x, y) > 0.9
    copy = clone(pipe[1])
    assert copy.get_params() == pipe[1].get_params()
    assert not hasattr(copy, "heads_")


def test_joblib_brings_back_the_same_codes(fitted, tmp_path):
    coder, x, _ = fitted
    joblib.dump(coder, tmp_path / "coder.joblib")
    again = joblib.load(tmp_path / "coder.joblib")
    assert (again.transform(x) != coder.transform(x)).nnz == 0


def test_a_folder_brings_back_the_same_coder(fitted, tmp_path):
    coder, x, _ = fitted
    coder.name([f"kind {row % 6} thing" for row in range(len(x))])
    coder.save(tmp_path / "model")
    for load in (ncl.SparseCoder.load, ncl.load):
        again = load(tmp_path / "model")
        assert again.get_params() == coder.get_params()
        for query in (False, True):
            same = again.transform(x, query=query) != coder.transform(x, query=query)
            assert same.nnz == 0
        assert np.array_equal(again.get_feature_names_out(), coder.get_feature_names_out())
        assert np.array_equal(again.inverse_transform(x[:2] @ np.ones((24, 48))),
                              coder.inverse_transform(x[:2] @ np.ones((24, 48))))  # fmt: skip
        assert again.partial_fit(x[:50]).n_rows_ == 290


@pytest.mark.parametrize("damage", ["cut", "params", "width", "pickle"])
def test_a_damaged_folder_is_refused_in_words(fitted, tmp_path, damage):
    coder, _, _ = fitted
    folder = coder.save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if damage == "cut":
        content = (folder / "coder.safetensors").read_bytes()
        (folder / "coder.safetensors").write_bytes(content[: len(content) // 2])
    elif damage == "pickle":
        joblib.dump({"heads": 1}, folder / "coder.safetensors")
    elif damage == "params":
        config["options"]["params"]["evil"] = 1
    else:
        config["options"]["widths"] = [5]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not contain a model"):
        ncl.load(folder)


def test_queries_are_fuller_and_explain_sums_to_the_score(fitted):
    _, x, _ = fitted
    coder = small(idf=True, k_query=12).fit(x)
    index = SparseIndex(48)
    index.add(range(len(x)), coder.transform(x))
    query = coder.transform(x[:3], query=True)
    assert np.diff(query.indptr).max() <= 12
    assert query.nnz > coder.transform(x[:3]).nnz
    ids, scores = index.search(query, k=5)
    for row in range(3):
        for item, score in zip(ids[row], scores[row], strict=True):
            parts = explain(query[[row]], index.codes([int(item)]))
            assert math.fsum(part.share for part in parts) == pytest.approx(score, abs=1e-6)


def test_engines_take_documents_and_fuller_queries(fitted):
    coder, x, _ = fitted
    documents, query = coder.transform(x), coder.transform(x[:1], query=True)
    by_hand = (query @ documents.T).toarray()[0]
    rows = list(milvus_rows(range(len(x)), documents))
    of_query = {
        "milvus": milvus_vector(query),
        "elasticsearch": {
            int(dim): weight
            for dim, weight in bulk_query(query, "sparse_vector")["query"]["sparse_vector"][
                "query_vector"
            ].items()
        },
        "pgvector": {
            int(dim) - 1: float(weight)
            for dim, weight in re.findall(r"(\d+):([\d.e-]+)", pgvector_literal(query))
        },
    }
    for engine, weights in of_query.items():
        scores = [sum(weights.get(d, 0) * v for d, v in row["code"].items()) for row in rows]
        assert scores == pytest.approx(by_hand, abs=1e-5), engine


@pytest.mark.parametrize("idf", [False, True])
def test_a_query_is_the_head_and_twice_what_rebuilds_embeddings(fitted, idf):
    _, x, _ = fitted
    coder = small(idf=idf, ks=(2, 6)).fit(x)
    z = np.concatenate([coder.transform(x, k=k).toarray() for k in (2, 6)]).astype(np.float64)
    h = np.concatenate([x, x]).astype(np.float64)
    gram = z.T @ z + 0.1 * np.eye(48)
    atoms = np.linalg.solve(gram, z.T @ (h - h.mean(axis=0)))
    head = coder.transform(x[:9], k=48).toarray()
    details = np.maximum(x[:9] @ atoms.T, 0)
    expected = head + 2 * details / np.linalg.norm(details, axis=1, keepdims=True)
    expected *= coder.idf_ if idf else 1
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(coder.transform(x[:9], k=48, query=True).toarray(), expected, atol=1e-5)


def test_queries_of_two_sides_are_the_head_s():
    x, _ = kinds()
    coder = small(steps=2).fit(x, other=x[:, :9])
    assert (coder.transform(x, query=True, k=6) != coder.transform(x)).nnz == 0


def test_whole_queries_find_what_the_embeddings_find():
    x, _ = kinds(rows=600, classes=60, seed=4)
    coder = small(dims=128, steps=100).fit(x[:500])
    right = np.argsort(-(x[500:] @ x[:500].T), axis=1)[:, :10]

    def kept(query):
        z = coder.transform(x[500:], k=128, query=query)
        near = np.argsort(-(z @ coder.transform(x[:500]).T).toarray(), axis=1)[:, :10]
        return np.mean([len(np.intersect1d(*rows)) for rows in zip(near, right, strict=True)])

    assert kept(query=True) > kept(query=False)


def test_rare_dimensions_weigh_more_in_queries(fitted):
    coder, x, _ = fitted
    active = np.bincount(coder.transform(x).indices, minlength=48)
    by_hand = [math.log((1 + 240) / (1 + count)) + 1 for count in active]
    assert np.allclose(coder.idf_, by_hand)


def test_names_come_from_the_words_of_texts(fitted):
    coder, x, y = fitted
    words = ["apple", "bridge", "candle", "dragon", "engine", "forest"]
    names = coder.name([f"the {words[kind]}" for kind in y])
    assert len(names) == 48
    assert {part for name in names for part in re.split("[,:] ", name)} <= {*words, "mixed", ""}
    out = coder.get_feature_names_out()
    assert len(set(out)) == 48
    with pytest.raises(ValueError, match="one text per row, 240; got 2"):
        coder.name(["a", "b"])
    assert coder.name([f"the {words[kind]}" for kind in y[:50]], x[:50]) != []


def test_findings_name_what_predicts_a_label_or_a_number(fitted):
    coder, x, y = fitted
    best = coder.findings(x, np.array(list("abcdef"))[y])[0]
    rows = coder.transform(x).toarray()[:, best.dimension] > 0
    letters = np.array(list("abcdef"))[y]
    share = (letters[rows] == best.value).mean() - (letters[~rows] == best.value).mean()
    assert best.effect == pytest.approx(share)
    assert best.p_value < 1e-6
    with pytest.raises(ValueError, match="every row needs a target; row 3 has none"):
        coder.findings(x, ["a", "b", "a", None, *letters[4:]])
    number = coder.findings(x, (y == 2).astype(float))[0]
    assert number.value is None
    assert coder.findings(x, np.random.default_rng(0).standard_normal(240), most_p=0.001) == []


def test_the_atlas_is_a_page_about_these_items(fitted, tmp_path):
    coder, x, y = fitted
    page = coder.atlas(x, [f"item {row}" for row in range(240)], y, out=tmp_path / "page")
    assert page.name == "atlas.html"
    assert page.stat().st_size > 10_000


def test_many_rows_are_sampled_and_blocks_make_the_whole(tmp_path):
    x, _ = kinds(rows=500)
    np.save(tmp_path / "x.npy", x.astype(np.float16))
    memmap = np.load(tmp_path / "x.npy", mmap_mode="r")
    coder = small(steps=2, max_rows=100).fit(memmap)
    assert coder.n_rows_ == 500
    whole = coder.transform(memmap)
    assert whole.shape == (500, 48)
    assert (whole != coder.transform(tmp_path / "x.npy")).nnz == 0
    assert (whole != coder.transform(x.astype(np.float16))).nnz == 0
    assert sum(part.shape[0] for part in coder.stream(memmap)) == 500
    assert len(coder.name([f"text {row % 5}" for row in range(500)])) == 48


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "row 7, column 2 contains NaN"), (np.inf, "row 7, column 2 contains infinity")],
)
def test_numbers_that_are_not_finite_are_refused_with_their_place(value, message):
    x, _ = kinds()
    x[7, 2] = value
    with pytest.raises(ValueError, match=message):
        small().fit(x)
    with pytest.raises(ValueError, match=message):
        small(steps=1).fit(kinds()[0]).transform(torch.from_numpy(x))


def test_one_row_and_another_width_are_refused(fitted):
    coder, x, _ = fitted
    with pytest.raises(ValueError, match="n_samples = 1"):
        small().fit(x[:1])
    for given in (x[:, :5], torch.from_numpy(x[:, :5])):
        with pytest.raises(ValueError, match="X has 5 features, but SparseCoder is expecting 24"):
            coder.transform(given)


@pytest.mark.parametrize("columns", ["one", "all"])
def test_constant_columns_are_handled(columns):
    x, _ = kinds(rows=20)
    x[:, slice(3, 4) if columns == "one" else slice(None)] = 2.0
    coder = small(steps=2).fit(x)
    assert np.isfinite(coder.transform(x).data).all()
    assert np.isfinite(coder.reconstruction_error_)


def test_equal_rows_have_equal_codes():
    x = np.repeat(kinds(rows=4)[0], 10, axis=0)
    z = small(steps=2).fit_transform(x).toarray()
    assert np.isfinite(z).all()
    assert np.array_equal(z, np.repeat(z[::10], 10, axis=0))


def test_fewer_rows_than_dims_are_enough():
    x, _ = kinds(rows=3)
    z = small(steps=2).fit_transform(x)
    assert z.shape == (3, 48)
    assert np.diff(z.indptr).min() > 0


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.float16, np.float64, bool])
def test_numbers_of_any_type_are_taken(dtype):
    x = (10 * np.abs(kinds(rows=20)[0])).astype(dtype)
    z = small(steps=2).fit_transform(x)
    assert z.dtype == np.float32
    assert abs(z - small(steps=2).fit_transform(x.astype(np.float32))).max() < 1e-5


def test_sparse_rows_have_the_codes_of_dense_ones():
    x, _ = kinds(rows=20)
    sparse = csr_array(np.where(x > 0, x, 0))
    dense = small(steps=2).fit(sparse.toarray()).transform(sparse)
    assert (dense != small(steps=2).fit(sparse).transform(sparse.toarray())).nnz == 0


def test_numbered_columns_of_parquet_files_may_be_in_any_order(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    x, _ = kinds(rows=40)
    order = np.random.default_rng(0).permutation(24).tolist()
    files = []
    for number, columns in enumerate((range(24), order)):
        rows = x[20 * number : 20 * number + 20]
        files.append(tmp_path / f"{number}.parquet")
        parquet.write_table(pyarrow.table({f"e{c}": rows[:, c] for c in columns}), files[-1])
    z = small(steps=2).fit(files).transform(files)
    assert (z != small(steps=2).fit_transform(x)).nnz == 0
    parquet.write_table(pyarrow.table({f"e{c}": x[:, c] for c in range(9)}), files[1])
    with pytest.raises(ValueError, match=r"must have 24 columns like the first; file 1 has 9"):
        small().fit(files)


def test_rows_of_zeros_have_codes_of_zeros(fitted):
    coder, x, _ = fitted
    z = coder.transform(np.concatenate([np.zeros((2, 24)), x[:1]]))
    assert np.diff(z.indptr).tolist()[:2] == [0, 0]
    assert z[[2]].nnz > 0


@pytest.mark.parametrize("size", [1e-30, 1000, 1e30])
def test_only_the_direction_of_a_row_counts(fitted, size):
    coder, x, _ = fitted
    difference = coder.transform(x) - coder.transform(np.float32(size) * x)
    assert abs(difference).max() < 1e-5
    sized = small(steps=3).fit(np.float32(size) * x)
    assert abs(small(steps=3).fit_transform(x) - sized.transform(x)).max() < 1e-4
    assert 0 < sized.reconstruction_error_ < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 49}, "k must be at most dims, 48; got 49"),
        ({"dims": 0}, "dims must be a whole number of at least 1"),
        ({"k": 2.5}, "k must be a whole number of at least 1; got 2.5"),
        ({"k_query": 0}, "k_query must be a whole number of at least 1; got 0"),
        ({"ks": (4, 0)}, "each of ks must be a whole number of at least 1; got 0"),
        ({"ks": ()}, "ks must be None or whole numbers"),
        ({"ks": 8}, "ks must be None or whole numbers"),
        ({"learning_rate": "fast"}, "learning_rate must be a finite number; got 'fast'"),
        ({"imitation": np.inf}, "imitation must be a finite number; got inf"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"noise": -0.1}, "noise must be at least 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small().set_params(**options).fit(kinds()[0])


def test_entries_of_a_code_must_be_a_number_from_one(fitted):
    coder, x, _ = fitted
    for k in (0, -1):
        with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
            coder.transform(x, k=k)


def test_every_row_needs_a_group():
    x, y = kinds()
    for without in (None, np.nan):
        with pytest.raises(ValueError, match="every row needs a group; row 1 has none"):
            small().fit(x, groups=[0, without, *y[2:]])


def test_parameters_of_numpy_come_back_from_a_folder(tmp_path):
    x, _ = kinds()
    given = {"dims": np.int64(40), "k": np.int32(4), "ks": np.array([2, 4])}
    coder = small(steps=2).set_params(**given).fit(x)
    again = ncl.load(coder.save(tmp_path / "model"))
    assert (again.transform(x) != coder.transform(x)).nnz == 0
    assert again.get_params()["ks"] == [2, 4]


def test_a_row_has_several_topics(fitted):
    coder, x, _ = fitted
    codes = coder.transform(x[:5]).toarray()
    for topics, code in zip(coder.topics(x[:5], most=4), codes, strict=True):
        strongest = np.argsort(-code, kind="stable")[:4].tolist()
        assert [topic.dimension for topic in topics] == strongest
        assert [topic.share for topic in topics] == pytest.approx(np.sort(code**2)[:-5:-1])
        assert topics[0].name == coder.get_feature_names_out()[topics[0].dimension]
    whole = coder.topics(x[:1], most=100)[0]
    assert math.fsum(topic.share for topic in whole) == pytest.approx(1)
    assert coder.topics(np.zeros((1, 24))) == [[]]


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_column_of_a_table_is_taken(library):
    column = {"pandas": "Series", "polars": "Series", "pyarrow": "array"}[library]
    make = getattr(pytest.importorskip(library), column)
    x, _ = kinds(rows=40)
    z = small(steps=2).fit_transform(make(x.tolist()))
    assert (z != small(steps=2).fit_transform(x)).nnz == 0
    with pytest.raises(ValueError, match=r"row 1 is \(3,\), the first \(24,\)"):
        small().fit(make([x[0].tolist(), x[1, :3].tolist()]))
    with pytest.raises(ValueError, match=r"row 1 is None, the first \(24,\)"):
        small().fit(make([x[0].tolist(), None]))


def test_something_else_than_rows_of_numbers_is_refused():
    for source in ({"a": 1}, None, iter(kinds()[0])):
        with pytest.raises(ValueError, match=r"must have the shape \(rows, dimensions\); got \(\)"):
            small().fit(source)


def test_one_of_several_parquet_columns_is_taken(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    x, _ = kinds(rows=40)
    table = {"title": list(x[::-1]), "body": list(x)}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="choose one with name="):
        small().fit(tmp_path / "x.parquet")
    z = small(steps=2).fit_transform(Shards(tmp_path / "x.parquet", name="body"))
    assert (z != small(steps=2).fit_transform(x)).nnz == 0


def test_a_column_of_datasets_is_taken():
    datasets = pytest.importorskip("datasets")
    x, _ = kinds(rows=40)
    column = datasets.Dataset.from_dict({"embedding": x.tolist()})["embedding"]
    z = small(steps=2).fit_transform(column)
    assert (z != small(steps=2).fit_transform(x)).nnz == 0
