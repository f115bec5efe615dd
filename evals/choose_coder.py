"""Which settings should `SparseCoder` have? Search, without the collections that are reported.

Each text is cut in two: its beginning searches, and the coder is fitted on the rests only. `item`:
does it find its own rest? `topic`: does it find texts of its kind? The first rewards details, the
second what texts have in common, as judges of relevance do.

    docstrings   of NumPy, SciPy and scikit-learn: the first sentence, the next 100 words; a kind is
                 a module
    captions     of Flickr8k's training pictures (NCL_DATA): one caption, the other four; no kinds

Usage:
    python evals/choose_coder.py
    python evals/choose_coder.py --change temperature=0.05 steps=100 --seeds 0 1 2
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from choosing import Comparison, Text, docstrings

from ncl_multi.log import show_messages

if TYPE_CHECKING:
    import numpy as np

COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"imitation": 3.0},
    {"imitation": 30.0},
    {"temperature": 0.07},
    {"temperature": 0.1},
    {"noise": 0.3},
    {"learning_rate": 1e-3},
    {"neighbours": 5},
    {"steps": 600},
    {"dims": 768},
)
"""Changes to the defaults, one at a time."""


@dataclass(frozen=True)
class Config(Comparison):
    """Settings of `SparseCoder` compared by known-item search."""

    texts: tuple[str, ...] = ("docstrings", "captions")
    """Which texts."""
    most: int = 1200
    """Texts of each kind, at even distances."""
    k: tuple[int, ...] = (4, 16, 64)
    """Entries of a code."""
    cache: Path = Path("runs/embeddings")
    """Folder that keeps MiniLM's embeddings."""


def captions() -> list[Text]:
    """Captions of the training pictures of Flickr8k: the first, and the other four."""
    from ncl_multi.data import flickr8k

    of_pictures = flickr8k("train").captions
    return [Text(texts[0], " ".join(texts[1:]), None) for texts in of_pictures if len(texts) > 1]


def compare(
    change: dict[str, Any],
    x: "np.ndarray",
    queries: "np.ndarray",
    kinds: "np.ndarray | None",
    ks: tuple[int, ...],
    seed: int,
) -> dict[str, float]:
    """Figures of the defaults with a change, for each k with equal and with whole queries.

    nDCG@10 as a share of the whole embeddings', how many of their ten nearest are kept, and with
    kinds the purity of dimensions.
    """
    import numpy as np
    import torch
    from scipy.sparse import csr_array, eye_array

    import ncl_multi as ncl
    from ncl_multi.metrics import ndcg_at_k, purity

    right = {"item": csr_array(eye_array(len(x), format="csr"))}
    if kinds is not None:
        right["topic"] = csr_array((kinds[:, None] == kinds).astype(float))
    dense = torch.from_numpy(queries), torch.from_numpy(x)
    whole = {name: ndcg_at_k(*dense, gains) for name, gains in right.items()}
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, x)]
    near = np.argsort(-(unit[0] @ unit[1].T), axis=1, kind="stable")[:, :10]
    figures: dict[str, float] = {}
    options: dict[str, Any] = {"k": max(ks), "ks": ks, "random_state": seed} | change
    coder = ncl.SparseCoder(**options).fit(x)
    for k in ks:
        codes = coder.transform(x, k=k)
        if kinds is not None:
            numbers = torch.from_numpy(np.unique(kinds, return_inverse=True)[1])
            figures[f"purity_{k}"] = purity(codes, numbers)
        for name, entries in {"": k, "_whole_query": coder.dims}.items():
            searching = coder.transform(queries, k=entries, query=True)
            figures[f"kept_{k}{name}"] = kept_neighbours(near, searching, codes)
            for what, gains in right.items():
                share = ndcg_at_k(searching, codes, gains) / whole[what]
                figures[f"{what}_{k}{name}"] = share
    return figures


def kept_neighbours(near: "np.ndarray", queries: Any, items: Any) -> float:
    """Mean share of a query's nearest rows that are also nearest by codes."""
    import numpy as np

    scores = (queries @ items.T).toarray()
    nearest_by_codes = np.argsort(-scores, axis=1, kind="stable")[:, : near.shape[1]]
    pairs = zip(near, nearest_by_codes, strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in pairs]))


def rows(cfg: Config) -> Iterator[dict[str, Any]]:
    """One row per kind of texts and change."""
    import numpy as np
    from baselines import embed_texts

    for kind in cfg.texts:
        texts = {"docstrings": docstrings, "captions": captions}[kind]()
        chosen = np.linspace(0, len(texts) - 1, min(cfg.most, len(texts))).astype(int)
        queries, documents, kinds = zip(*(texts[row] for row in chosen), strict=True)
        name = f"{kind}_{len(chosen)}"
        x = embed_texts(cfg.cache / f"{name}.npy", list(documents))
        q = embed_texts(cfg.cache / f"{name}_q.npy", list(queries))
        labels = None if None in kinds else np.array(kinds)
        for change in cfg.changes(COMPARED):
            figures = cfg.means(partial(compare, change, x, q, labels, cfg.k))
            yield {"texts": kind, "change": change} | figures


if __name__ == "__main__":
    show_messages()
    config = tyro.cli(Config)
    config.show(rows(config))
