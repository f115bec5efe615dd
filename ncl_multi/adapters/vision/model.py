"""SimCLR with a non-negative head, on any backbone of timm or torchvision."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ncl_multi.adapters.vision.config import ClassifierConfig, VisionConfig
from ncl_multi.adapters.vision.objective import SimCLR, Supervised
from ncl_multi.adapters.vision.views import Views
from ncl_multi.data.pictures import ImageSet, thumbnails, whole
from ncl_multi.distributed import world_size
from ncl_multi.files import read_picture
from ncl_multi.head import Activation, HeadOptions
from ncl_multi.losses import NonNegCrossEntropy
from ncl_multi.model import SparseModel
from ncl_multi.optional import needs

with needs("ncl-multi[vision]"):
    import timm.optim
    from PIL import Image

log = logging.getLogger(__name__)

MOST_SIDE = 1024
"""Largest side of images, in pixels: an encoder's width is found with one image of this size."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class NonNegVision(
    SparseModel,
    library_name="ncl_multi",
    pipeline_tag="image-feature-extraction",
    tags=["non-negative-contrastive-learning", "sparse-embeddings"],
    paper_url="https://arxiv.org/abs/2403.12459",
):
    """A backbone and a non-negative head, trained with SimCLR.

    `fit` takes images as `encode` does, or an `ImageSet`; labels are not used.

    Args:
        model: A name of `timm.list_models()`, `torchvision/<name>`, or `resnet-small`, three blocks
            for small images and few cores.
        dims: Number of non-negative dimensions.
        hidden_dim: Width of the projector's hidden layer; None for a linear head.
        activation: See `NonNegHead`, as `batch_norm`, `density` and `k`.
        size: Side of the images. ResNets get the CIFAR stem (a 3x3 convolution, no pooling) up
            to 64.
        pretrained: Start from the library's own weights.
        seed: Seed of the initial weights.

    Example:
        >>> model = NonNegVision("resnet-small", dims=64, hidden_dim=None)
        >>> model.embed(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
        torch.Size([2, 256])
    """

    kind = "vision"
    example = 'model.encode(["a.jpg", "b.jpg"])  # files, PIL images or a uint8 tensor'
    config_type = VisionConfig
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: str = "resnet18",
        dims: int = 512,
        *,
        hidden_dim: int | None = 512,
        activation: Activation = "relu",
        batch_norm: bool = True,
        density: float | None = 0.04,
        k: int | None = None,
        size: int = 32,
        pretrained: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        if not 1 <= size <= MOST_SIDE:
            raise ValueError(f"size must be 1 to {MOST_SIDE} pixels; got {size}")
        if activation not in ("relu", "rep_relu") or not batch_norm:
            density = None
        self.name, self.size = model, size
        head = HeadOptions(dims, hidden_dim, activation, batch_norm, density, k)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = backbone(model, size, pretrained)
            self.head = head.build(_width(self.encoder, size))
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)

    def forward(self, x: Float[Tensor, "n 3 height width"], *, features: bool = False) -> Any:
        """Codes of images with values in [0, 1]; with `features` features and codes."""
        h = self.represent(x)
        return (h, self.head(h)) if features else self.head(h)

    def represent(self, x: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n features"]:
        """The encoder's output for images whose values lie in [0, 1]."""
        x = ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        return self.encoder(x)

    def options(self) -> dict[str, Any]:
        return {"model": self.name, "size": self.size} | asdict(self.head.options)

    @classmethod
    def _build(cls, options: dict[str, Any], folder: Path, **load_options: Any) -> "NonNegVision":
        # A saved model has its weights; a config that asks for others would have them fetched.
        if options.pop("pretrained", False):
            raise ValueError("pretrained must not be set in the config of a saved model")
        return super()._build(options, folder, **load_options)

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        images = image_set(data, self.size)
        config = config.for_rows(len(images), "images")
        views = Views(
            max(1, round(config.view_scale * self.size)),
            jitter=config.jitter,
            hue=config.jitter / 4,
            blur_share=config.blur_share,
        )
        objective = SimCLR(
            self, views, loss=config.loss, temperature=config.temperature, signed=config.signed
        )
        _train(objective, images, config)
        return {"data": images.name or "images", "images": len(images)}

    def _embedded(self, items: Any, batch_size: int | None, progress: bool) -> Iterator[Tensor]:
        from tqdm.auto import tqdm

        size = batch_size or 256
        images = items.images if isinstance(items, ImageSet) else items
        starts = range(0, len(images), size)
        for start in tqdm(starts, desc="encode", unit="batch", leave=False, disable=not progress):
            with torch.inference_mode():
                yield self.represent(self.prepare(images[start : start + size]))

    def prepare(self, images: Tensor | Sequence[Any]) -> Float[Tensor, "n 3 size size"]:
        """Images as inputs of the encoder: in [0, 1], three channels, its size and device."""
        if not isinstance(images, Tensor):
            images = as_tensor(images, self.size)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"images must be uint8 of shape (n, 1 or 3, height, width); got "
                f"{images.dtype} {tuple(images.shape)}"
            )
        x = images.to(self.mean.device).expand(-1, 3, -1, -1).float() / 255
        if x.shape[2:] != (self.size, self.size):
            x = nn.functional.interpolate(
                x, (self.size, self.size), mode="bilinear", antialias=True
            ).clamp(0, 1)
        return x

    def _display(self, items: Any) -> dict[str, Any]:
        images = image_set(items, self.size)
        return {"thumbnails": thumbnails(images)}


class NonNegClassifier(NonNegVision):
    """A `NonNegVision` that learns from labels, with a linear classifier on its codes.

    With a signed head (`activation="none"`) the loss is plain cross entropy, with a non-negative
    one it is the paper's NCE. `classes` is the number of classes. `fit` takes an `ImageSet`.
    """

    kind = "classifier"
    config_type = ClassifierConfig

    def __init__(
        self,
        model: str = "resnet18",
        dims: int = 256,
        *,
        classes: int,
        hidden_dim: int | None = None,
        density: float | None = None,
        seed: int = 0,
        **options: Any,
    ):
        super().__init__(model, dims, hidden_dim=hidden_dim, density=density, seed=seed, **options)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.classifier = NonNegCrossEntropy(dims, classes)

    def options(self) -> dict[str, Any]:
        return super().options() | {"classes": len(self.classifier.weight)}

    def predict(self, images: Any, *, batch_size: int | None = None) -> Int[Tensor, " n"]:
        """The likeliest class of each image."""
        z = self.encode(images, dense=True, batch_size=batch_size)
        return (z @ self.classifier.weight.detach().cpu().T).argmax(1)  # type: ignore[union-attr]

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        if not isinstance(data, ImageSet):
            raise ValueError(
                f"a classifier needs images with labels, an ImageSet; got {type(data).__name__}"
            )
        config = config.for_rows(len(data), "images")
        side = max(1, round(config.view_scale * self.size))
        views = Views(side, scale=(0.4, 1.0), jitter_share=0.0, grey_share=0.0)
        _train(Supervised(self, views), data, config)
        return {"data": data.name or "images", "images": len(data), "labels": True}


def image_set(data: Any, size: int) -> ImageSet:
    """Images as an `ImageSet`; images without labels get zeros."""
    if isinstance(data, ImageSet):
        return data
    images = data if isinstance(data, Tensor) else as_tensor(data, size)
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"images must be uint8 of shape (n, 1 or 3, height, width); got {images.dtype} "
            f"{tuple(images.shape)}"
        )
    return ImageSet(images, torch.zeros(len(images), dtype=torch.long), ["image"])


def as_tensor(images: Sequence[Any], size: int) -> Tensor:
    """PIL images or image files as one uint8 tensor."""
    from ncl_multi.data.folders import square

    if isinstance(images, str | bytes) or not len(images):
        raise ValueError(f"images must be a list of at least one image; got {images!r}")
    rows = []
    for row, image in enumerate(images):
        if isinstance(image, Image.Image):
            rows.append(square(image, size))
        elif isinstance(image, str | Path):
            try:
                rows.append(square(read_picture(image), size))
            except (OSError, ValueError) as error:
                raise ValueError(f"row {row} is not an image: {image}: {error}") from error
        else:
            raise ValueError(f"row {row} must be a PIL image or a file; got {type(image).__name__}")
    return torch.stack(rows)


def fingerprint(images: ImageSet) -> str | None:
    """A hash of all pixels and labels, or of the names and sizes of files and 64 pictures.

    None for a table of the hub, for which `fit` hashes 64 rows.
    """
    pictures: Any = images.images
    digest = hashlib.sha256(images.y.numpy().tobytes())
    if isinstance(pictures, Tensor):
        digest.update(pictures.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]
    files = getattr(pictures, "files", None)
    if not isinstance(files, list):
        return None
    for file in files:
        digest.update(f"{file.name}/{file.stat().st_size}".encode())
    sample = torch.linspace(0, len(files) - 1, min(64, len(files))).long().unique().tolist()
    digest.update(pictures[sample].numpy().tobytes())
    return digest.hexdigest()[:16]


def _train(objective: SimCLR | Supervised, images: ImageSet, config: Any) -> None:
    from ncl_multi.training import fit as loop

    on_processor = config.device == "cpu" or not torch.accelerator.is_available()
    bf16_on_processor = config.precision == "bf16" and on_processor
    encoder, side = objective.model.encoder, objective.views.size
    if bf16_on_processor and _strides_over_one_pixel(encoder, side):
        log.warning("precision fp32: bf16 gives NaN where a convolution strides over one pixel")
        config = replace(config, precision="fp32")
    optimizer = None
    if config.optimizer == "lars":
        optimizer = lars(config.lr, config.weight_decay, config.batch_size)
    loader = DataLoader(
        cast(Any, images),
        config.batch_size,
        collate_fn=whole,
        num_workers=config.workers,
        drop_last=True,
    )
    loop.fit(objective, loader, config, optimizer=optimizer, fingerprint=fingerprint(images))


def backbone(name: str, size: int, pretrained: bool = False) -> nn.Module:
    """An encoder without its classifier."""
    if name.startswith("torchvision/"):
        model = _from_torchvision(name.removeprefix("torchvision/"), pretrained)
    elif name == "resnet-small":
        model = _small_resnet()
    elif timm.is_model(name):
        cfg = timm.get_pretrained_cfg(name)
        fixed: dict[str, Any] = {"img_size": size} if cfg and cfg.fixed_input_size else {}
        model = timm.create_model(name, num_classes=0, pretrained=pretrained, **fixed)
    else:
        near = timm.list_models(f"*{name[:6]}*")[:5]
        raise ValueError(
            f"model must be resnet-small, torchvision/<name>, or one of timm.list_models(); got "
            f"{name!r}. Near: {', '.join(near) or 'none'}"
        )
    stem = getattr(model, "conv1", None)
    if size <= 64 and isinstance(stem, nn.Conv2d) and stem.kernel_size == (7, 7):
        model.conv1 = nn.Conv2d(3, stem.out_channels, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def lars(
    lr: float, weight_decay: float, batch_size: int
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """SimCLR's optimiser, for `fit`: a learning rate for 256 rows, without biases and norms."""

    def make(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        weights = list(weights)
        scale = batch_size * world_size() / 256
        groups = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group | {"lr_scale": scale} for group in groups if group["params"]]
        return timm.optim.Lars(groups, lr=lr, momentum=0.9, trust_coeff=0.02, trust_clip=True)

    return make


def _small_resnet() -> nn.Module:
    """A 3x3 stem of 32 channels, max-pooling by 2, residual blocks of 64, 128 and 256 channels.

    The blocks give 16x16, 8x8 and 4x4 of 32x32 pixels. Pooling comes before the first BatchNorm,
    which then has a quarter of the work. A block's branch counts from the first step: if its last
    BatchNorm starts at zero, a run of minutes ends before the branch has grown.
    """
    from timm.models.resnet import BasicBlock, ResNet

    block: Any = BasicBlock
    model: Any = ResNet(
        block, (1, 1, 1, 1), num_classes=0, channels=(64, 128, 256, 256), stem_type="deep",
        stem_width=16, avg_down=True, zero_init_last=False,
    )  # fmt: skip
    model.conv1 = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.MaxPool2d(2))
    model.maxpool, model.layer4 = nn.Identity(), nn.Identity()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            # Smaller than timm's: before a BatchNorm, small weights turn faster.
            layer.reset_parameters()
    return model


def _from_torchvision(name: str, pretrained: bool) -> nn.Module:
    from torchvision import models

    # Models for other tasks would fetch a pretrained backbone.
    if name not in models.list_models(module=models):
        raise ValueError(
            f"torchvision has no classifier {name!r}; see torchvision.models.list_models("
            f"module=torchvision.models)"
        )
    model = models.get_model(name, weights="DEFAULT" if pretrained else None)
    for last in ("fc", "classifier", "heads", "head"):
        if hasattr(model, last):
            setattr(model, last, nn.Identity())
            return model
    raise ValueError(f"torchvision's {name} has no classifier to remove; use a timm model")


def _width(encoder: nn.Module, size: int) -> int:
    """Width of the encoder's output, from a forward pass."""
    encoder.eval()
    device = next(encoder.parameters()).device
    with torch.no_grad():
        width = encoder(torch.zeros(1, 3, size, size, device=device)).shape[-1]
    encoder.train()
    return width


def _strides_over_one_pixel(encoder: nn.Module, side: int) -> bool:
    """Whether a strided convolution gets maps of one pixel from images of this side.

    On processors the gradient of its weights in bf16 has values that were never written.
    """
    smallest: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: smallest.append(given[0][0, 0].numel()))
        for layer in encoder.modules()
        if isinstance(layer, nn.Conv2d) and max(layer.stride) > 1
    ]
    _width(encoder, side)
    for hook in hooks:
        hook.remove()
    return 1 in smallest
