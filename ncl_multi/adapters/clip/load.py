"""Towers by name: from packages, from open_clip, from timm and transformers, from the hub."""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from ncl_multi.adapters.clip.towers import (
    HuggingFaceTowers,
    OpenClipTowers,
    Towers,
    build_open_clip,
    check_open_clip,
    no_remote_code,
    processors_of,
)
from ncl_multi.optional import needs

with needs("ncl-multi[clip]"):
    import open_clip
    import timm
    import transformers
    from open_clip.transform import PreprocessCfg

DEMO = "efficientnet-lite0+minilm"
"""Two pretrained towers that come as ordinary packages, without the hub."""

_DEMO_SIZE = 160
"""Half of the pixels the tower was trained with: a CPU reads thousands of images a minute."""


def load_towers(name: str = DEMO, *, image_size: int | None = None) -> Towers:
    """Towers by name.

    - `efficientnet-lite0+minilm`: two pretrained towers that need no hub;
    - `<timm name>+<Hugging Face text model>`: any two, through open_clip's `CustomTextCLIP`;
    - `ViT-B-32`, `ViT-B-32:<tag>`: a model of open_clip with random or pretrained weights;
    - `hf-hub:<name>`: an open_clip model on the hub;
    - `hf:<name or folder>`: a Hugging Face CLIP or SigLIP model.

    `image_size` sets the side of the images of a timm or open_clip image tower. Towers that contain
    code of their own are refused.
    """
    with no_remote_code():
        if name.startswith("hf:"):
            source = name.removeprefix("hf:")
            model = transformers.AutoModel.from_pretrained(source, trust_remote_code=False)
            return HuggingFaceTowers(name, model, *processors_of(source))
        if name == DEMO:
            return _demo_towers(image_size)
        if "+" in name:
            image, text = name.split("+", 1)
            return _two_towers(name, image, text, image_size=image_size, pretrained=True)
        return _open_clip_towers(name, image_size)


def _open_clip_towers(name: str, image_size: int | None) -> OpenClipTowers:
    from_hub = name.startswith(("hf-hub:", "local-dir:"))
    model_name, tag = (name, None) if from_hub else (name.partition(":")[0], name.partition(":")[2])
    if not from_hub:
        _check_known("--model", model_name, open_clip.list_models())
        if tag:
            _check_known("weights", tag, open_clip.list_pretrained_tags_by_model(model_name))
    config = open_clip.get_model_config(model_name)
    check_open_clip(config, model_name)
    model = open_clip.create_model(model_name, pretrained=tag or None, force_image_size=image_size)
    if image_size is not None:
        config["vision_cfg"]["image_size"] = image_size
    return OpenClipTowers(model_name, model, config, open_clip.get_tokenizer(model_name))


def _two_towers(
    name: str, image: str, text: str, *, image_size: int | None, pretrained: bool
) -> OpenClipTowers:
    """A timm image model and a Hugging Face text model, without projections."""
    _check_known("image tower", image.partition(".")[0], timm.list_models())
    with torch.device("meta"):
        blank: Any = timm.create_model(image)
    timm_cfg = blank.pretrained_cfg
    text_config = transformers.AutoConfig.from_pretrained(text, trust_remote_code=False)
    pool = getattr(blank, "global_pool", "avg")
    config: dict[str, Any] = {
        # With this width open_clip leaves the pooled text feature as it is.
        "embed_dim": text_config.hidden_size,
        "vision_cfg": {
            "timm_model_name": image,
            "timm_model_pretrained": pretrained,
            "timm_pool": pool if isinstance(pool, str) else "avg",
            "timm_proj": "none",
            "image_size": image_size or timm_cfg["input_size"][-1],
        },
        "text_cfg": {
            "hf_model_name": text,
            "hf_model_pretrained": True,
            "hf_tokenizer_name": text,
            "hf_pooler_type": "mean_pooler",
            "hf_proj_type": None,
            "context_length": min(77, text_config.max_position_embeddings),
        },
    }
    with _quiet_about_unused_weights():
        model = build_open_clip(config, pretrained=True)
    size, mean, std = config["vision_cfg"]["image_size"], timm_cfg["mean"], timm_cfg["std"]
    model.visual.preprocess_cfg = asdict(PreprocessCfg(size=size, mean=mean, std=std))
    tokenizer = open_clip.tokenizer.HFTokenizer(
        text,
        context_length=config["text_cfg"]["context_length"],
    )
    return OpenClipTowers(name, model, config, tokenizer, all_layers=True, all_stages=True)


def _demo_towers(image_size: int | None) -> OpenClipTowers:
    from ncl_multi import data

    towers = _two_towers(
        DEMO, "tf_efficientnet_lite0", str(data.minilm()),
        image_size=image_size or _DEMO_SIZE, pretrained=False,
    )  # fmt: skip
    weights = data.efficientnet_lite0().state_dict()
    trunk = towers.model.visual.trunk
    trunk.load_state_dict({name: weights[name] for name in trunk.state_dict()})
    return towers


@contextmanager
def _quiet_about_unused_weights() -> Iterator[None]:
    """Hide the long message of transformers that the text tower's pooler is not used."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _check_known(what: str, name: str, choices: Sequence[str]) -> None:
    if name not in choices:
        lower = {one.lower(): one for one in choices}
        near = difflib.get_close_matches(name.lower(), lower, n=5, cutoff=0.4)
        offer = ", ".join(lower[one] for one in near) or "none"
        raise ValueError(f"{what} {name!r} is unknown; the nearest known names are: {offer}")
