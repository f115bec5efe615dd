"""The two towers under a non-negative CLIP, for images and for texts.

Whatever library they come from, they look alike to the heads: `pixels` and `tokens` prepare one
image and a list of texts, `image` and `text` turn batches of those into features, and `save` writes
all that `Towers.load` needs, except the weights, which are saved with the heads.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ncl_multi.files import check_keys, parse_json, read_bytes, read_json
from ncl_multi.model import fingerprint
from ncl_multi.optional import needs
from ncl_multi.settings import check_no_code

with needs("ncl-multi[clip]"):
    import open_clip
    import timm
    import transformers
    from open_clip.coca_model import MultimodalCfg
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from timm.models.efficientnet import EfficientNet

Pixels = Float[Tensor, "n c h w"]
Tokens = Int[Tensor, "n length"]

_SUFFIXES = {".codes", ".jinja", ".json", ".model", ".spm", ".txt"}
"""Endings of settings and vocabularies; `save` writes only these."""
_WIDEST = 2**16
_LOCAL = {"trust_remote_code": False, "local_files_only": True}
# What libraries raise for settings from which no model can be built.
_MISFITS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Towers(nn.Module):
    """Interface of the towers of a `NonNegClip`."""

    name: str
    image_dim: int
    text_dim: int

    def image(self, pixels: Pixels) -> Float[Tensor, "n image_dim"]:
        """Features of prepared images."""
        raise NotImplementedError

    def text(self, tokens: Tokens) -> Float[Tensor, "n text_dim"]:
        """Features of prepared texts."""
        raise NotImplementedError

    def pixels(self, image: Any) -> Float[Tensor, "c h w"]:
        """One PIL image, prepared."""
        raise NotImplementedError

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Texts, prepared."""
        raise NotImplementedError

    def transform(self) -> str:
        """Description of `pixels` for the cache: another transform gives another text."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write everything but the weights."""
        raise NotImplementedError

    @staticmethod
    def load(folder: Path) -> "Towers":
        """Towers as `save` left them, with random weights.

        The folder may be untrusted: no code is run, nothing is fetched, no question is asked.
        """
        check_no_code(folder, _SUFFIXES)
        kind = OpenClipTowers if (folder / "open_clip_config.json").exists() else HuggingFaceTowers
        try:
            with no_remote_code():
                return kind.load(folder)
        except _MISFITS as error:
            raise ValueError(f"no towers can be made from {folder}: {error}") from error

    def fingerprint(self) -> str:
        """A hash of the weights: the same for the same features, whatever the model is called."""
        return fingerprint(self)


class OpenClipTowers(Towers):
    """The towers of an open_clip model, which may be a timm and a Hugging Face model inside.

    `all_layers`, for a Hugging Face text tower, takes more than its last layer's mean: means of the
    embeddings, of the middle and of the last layer, and the last layer's maximum, side by side.
    In its last layer a frozen sentence encoder has lost words that matter for images. `all_stages`,
    for a timm image tower, also takes mean and maximum of the last three stages, which tell shapes
    and colours that ImageNet's classes do not need; models of version 0.1 are without it.
    """

    model: Any

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: dict[str, Any],
        tokenizer: Any,
        *,
        all_layers: bool = False,
        all_stages: bool = False,
    ):
        super().__init__()
        self.all_layers, self.all_stages = all_layers, all_stages
        self.name, self.model, self.config, self.tokenizer = name, model, config, tokenizer
        _keep_out_of_training(model)
        visual = self.model.visual.to(memory_format=torch.channels_last)
        self.prepare = image_transform_v2(PreprocessCfg(**visual.preprocess_cfg), is_train=False)
        self.image_dim = self.text_dim = config["embed_dim"]
        if config["vision_cfg"].get("timm_proj") == "none":
            self.image_dim = visual.trunk.num_features
        if all_layers:
            self.text_dim *= 4
        if all_stages:
            blank = deepcopy(visual.trunk).to("meta").eval()
            pixels = torch.zeros(1, 3, *visual.image_size, device="meta")
            self.image_dim = _stages(blank, pixels).shape[1]

    def image(self, pixels: Pixels) -> Float[Tensor, "n image_dim"]:
        # Convolutions are much faster with channels last, also on a CPU.
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        if self.all_stages:
            return _stages(self.model.visual.trunk, pixels)
        return self.model.encode_image(pixels)

    def text(self, tokens: Tokens) -> Float[Tensor, "n text_dim"]:
        if not self.all_layers:
            return self.model.encode_text(tokens)
        tower = self.model.text
        mask = tokens != tower.config.pad_token_id
        layers = tower.transformer(
            input_ids=tokens, attention_mask=mask.long(), output_hidden_states=True
        ).hidden_states
        weight = mask[..., None] / mask.sum(dim=1)[:, None, None].clamp(min=1)
        means = [(h * weight).sum(dim=1) for h in (layers[0], layers[len(layers) // 2], layers[-1])]
        largest = layers[-1].masked_fill(~mask[..., None], float("-inf")).amax(dim=1)
        return torch.cat([*means, largest], dim=1)

    def pixels(self, image: Any) -> Float[Tensor, "c h w"]:
        return self.prepare(image)

    def tokens(self, texts: Sequence[str]) -> Tokens:
        tokens = self.tokenizer(list(texts))
        tower = getattr(self.model, "text", None)
        if isinstance(tower, open_clip.hf_model.HFTextEncoder):
            # This tower masks its padding, so columns with only padding would waste time.
            used = (tokens != tower.config.pad_token_id).any(dim=0)
            tokens = tokens[:, : max(1, int(used.sum()))]
        return tokens

    def transform(self) -> str:
        # As JSON, which is the same before saving and after loading.
        return json.dumps(self.model.visual.preprocess_cfg, default=str)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = getattr(self.model, "text", None)
        if isinstance(text, open_clip.hf_model.HFTextEncoder):
            text.config.save_pretrained(folder)
        if isinstance(self.tokenizer, open_clip.tokenizer.HFTokenizer):
            self.tokenizer.save_pretrained(folder)
        settings = {
            "name": self.name,
            "model_cfg": self.config,
            "preprocess_cfg": self.model.visual.preprocess_cfg,
            "all_layers": self.all_layers,
            "all_stages": self.all_stages,
        }
        (folder / "open_clip_config.json").write_text(json.dumps(settings, indent=2))

    @staticmethod
    def load(folder: Path) -> "OpenClipTowers":
        path = folder / "open_clip_config.json"
        keys = ("name", "model_cfg", "preprocess_cfg", "all_layers")
        saved = read_json(path, keys, optional=("all_stages",))
        name, config, preprocess = saved["name"], saved["model_cfg"], saved["preprocess_cfg"]
        several = {key: saved.get(key, False) for key in ("all_layers", "all_stages")}
        if not isinstance(name, str) or set(map(type, several.values())) != {bool}:
            raise ValueError(
                f"{path} must give name as a text, all_layers and all_stages as true or false"
            )
        check_open_clip(config, path)
        _check_fields(preprocess, PreprocessCfg, f"preprocess_cfg of {path}")
        text = config["text_cfg"]
        if text.get("hf_model_name"):
            text["hf_model_name"] = str(folder)
        model = build_open_clip(config)
        model.visual.preprocess_cfg = preprocess
        length = text.get("context_length", open_clip.tokenizer.DEFAULT_CONTEXT_LENGTH)
        options = text.get("tokenizer_kwargs") or {}
        tokenizer: Any
        if text.get("hf_tokenizer_name"):
            mode = text.get("tokenizer_mode")
            tokenizer = open_clip.tokenizer.HFTokenizer(
                str(folder), context_length=length, tokenizer_mode=mode, **_LOCAL, **options
            )
        else:
            tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=length, **options)
        return OpenClipTowers(name, model, config, tokenizer, **several)


class HuggingFaceTowers(Towers):
    """The towers of a Hugging Face CLIP or SigLIP model."""

    model: Any

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, image_processor: Any):
        super().__init__()
        self.name, self.model = name, model
        self.tokenizer, self.image_processor = tokenizer, image_processor
        if not (hasattr(model, "get_image_features") and hasattr(model, "get_text_features")):
            raise ValueError(
                f"{name} has no image and text tower: it is a {type(model).__name__}. Give a CLIP "
                f"or SigLIP model, or two towers as <timm name>+<Hugging Face text model>"
            )
        _keep_out_of_training(model)
        config = self.model.config
        shared = getattr(config, "projection_dim", None)
        self.image_dim = shared or config.vision_config.hidden_size
        self.text_dim = shared or config.text_config.projection_size
        self.length: int = config.text_config.max_position_embeddings

    def image(self, pixels: Pixels) -> Float[Tensor, "n image_dim"]:
        return _pooled(self.model.get_image_features(pixel_values=pixels))

    def text(self, tokens: Tokens) -> Float[Tensor, "n text_dim"]:
        return _pooled(self.model.get_text_features(input_ids=tokens))

    def pixels(self, image: Any) -> Float[Tensor, "c h w"]:
        return self.image_processor(image, return_tensors="pt")["pixel_values"][0]

    def tokens(self, texts: Sequence[str]) -> Tokens:
        # CLIP reads the end of the text, SigLIP was trained on padding: neither needs a mask.
        return self.tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )["input_ids"]

    def transform(self) -> str:
        return str(self.image_processor)

    def save(self, folder: Path) -> None:
        for component in (self.model.config, self.tokenizer, self.image_processor):
            component.save_pretrained(folder)
        (folder / "name.json").write_text(json.dumps(self.name))

    @staticmethod
    def load(folder: Path) -> "HuggingFaceTowers":
        name = parse_json(read_bytes(folder / "name.json", 2**10), folder / "name.json")
        if not isinstance(name, str):
            raise ValueError(f"{folder / 'name.json'} must contain a text; got {name!r:.80}")
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        return HuggingFaceTowers(name, model, *processors_of(str(folder), local_files_only=True))


def build_open_clip(config: dict[str, Any], *, pretrained: bool = False) -> Any:
    """An open_clip model from its config."""
    config = deepcopy(config)
    if not pretrained:
        config["vision_cfg"].pop("timm_model_pretrained", None)
        if "hf_model_name" in config["text_cfg"]:
            config["text_cfg"]["hf_model_pretrained"] = False
    custom = config.pop("custom_text", False) or config["text_cfg"].get("hf_model_name")
    if "multimodal_cfg" in config:
        return open_clip.CoCa(**config)
    return open_clip.CustomTextCLIP(**config) if custom else open_clip.CLIP(**config)


def check_open_clip(config: Any, where: str | Path) -> None:
    """Refuse an open_clip config with unknown keys, or with a tower that would be downloaded."""
    where = f"model_cfg of {where}"
    if not isinstance(config, dict):
        raise ValueError(f"{where} must be an object; got {type(config).__name__}")
    optional = (
        "custom_text", "init_logit_bias", "init_logit_scale", "multimodal_cfg",
        "nonscalar_logit_scale", "quick_gelu",
    )  # fmt: skip
    check_keys(config, ("embed_dim", "vision_cfg", "text_cfg"), optional, where)
    if type(config["embed_dim"]) is not int or not 0 < config["embed_dim"] <= _WIDEST:
        raise ValueError(
            f"embed_dim in {where} must be 1 to {_WIDEST}; got {config['embed_dim']!r:.80}"
        )
    for name, kind in (
        ("vision_cfg", open_clip.CLIPVisionCfg),
        ("text_cfg", open_clip.CLIPTextCfg),
        ("multimodal_cfg", MultimodalCfg),
    ):
        if name in config:
            _check_fields(config[name], kind, f"{name} in {where}")
    tower = config["vision_cfg"].get("timm_model_name")
    if tower is not None and str(tower).partition(".")[0] not in timm.list_models():
        raise ValueError(f"{where} names the image tower {tower!r:.80}, which timm does not have")
    options = config["text_cfg"].get("tokenizer_kwargs")
    if options is not None:
        if not isinstance(options, dict):
            raise ValueError(f"tokenizer_kwargs in {where} must be an object; got {options!r:.80}")
        check_keys(options, (), ("clean", "strip_sep_token"), f"tokenizer_kwargs in {where}")


@contextmanager
def no_remote_code() -> Iterator[None]:
    """Let transformers refuse a model with code of its own at once, without a question.

    open_clip passes no `trust_remote_code`, and without one transformers asks.
    """
    settings = transformers.dynamic_module_utils
    time_out = settings.TIME_OUT_REMOTE_CODE
    settings.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        settings.TIME_OUT_REMOTE_CODE = time_out


def processors_of(source: str, *, local_files_only: bool = False) -> tuple[Any, Any]:
    options = {"trust_remote_code": False, "local_files_only": local_files_only}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    return tokenizer, transformers.AutoImageProcessor.from_pretrained(source, **options)


def _stages(trunk: Any, pixels: Pixels) -> Float[Tensor, "n i"]:
    """A timm model's pooled features, and the mean and maximum of each of its last stages."""
    if not hasattr(trunk, "forward_intermediates"):
        return trunk(pixels)
    # EfficientNet's final layer is not a stage, and it has more stages than it lists.
    efficient = isinstance(trunk, EfficientNet)
    finer = {"extra_blocks": True} if efficient else {}
    final, stages = trunk.forward_intermediates(pixels, indices=3, **finer)
    parts = [trunk.forward_head(final, pre_logits=True)]
    for maps in stages:
        parts += [maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))]
    return torch.cat([*parts, final.amax(dim=(2, 3))] if efficient else parts, dim=1)


def _check_fields(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object; got {type(value).__name__}")
    check_keys(value, (), [field.name for field in dataclasses.fields(kind)], where)


def _pooled(output: Any) -> Tensor:
    """Older transformers return the feature itself."""
    return output if isinstance(output, Tensor) else output.pooler_output


def _keep_out_of_training(model: nn.Module) -> None:
    """The model's own temperature is not used in the loss, and DDP fails on unused parameters."""
    for name, weight in model.named_parameters():
        if name in ("logit_scale", "logit_bias"):
            weight.requires_grad_(False)
