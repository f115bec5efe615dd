"""SimCLR with a non-negative head, on any backbone of timm or torchvision."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ncl_multi.codes.features import to_csr
from ncl_multi.distributed import world_size
from ncl_multi.head import Activation, NonNegHead
from ncl_multi.losses import NonNegCrossEntropy

try:
    import timm.optim
    from huggingface_hub import PyTorchModelHubMixin
    from PIL import Image
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"needs {error.name}: pip install 'ncl-multi[vision]'") from error

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

MODEL_CARD = """---
{{ card_data }}
---

# Non-negative image embeddings

Sparse, readable codes trained with [non-negative contrastive learning](https://arxiv.org/abs/2403.12459):
every dimension is at or above zero, most are exactly zero, and one fires for one kind of picture.

```python
from ncl_multi.adapters.vision.model import NonNegVision

model = NonNegVision.from_pretrained("{{ repo_id | default("this/model", true) }}")
codes = model.encode(images)  # uint8 (n, channels, height, width) or PIL pictures -> csr_array
```
"""


class NonNegVision(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="ncl_multi",
    pipeline_tag="image-feature-extraction",
    tags=["non-negative contrastive learning", "sparse embeddings"],
    model_card_template=MODEL_CARD,
):
    """A backbone and a non-negative head.

    Args:
        model: A name of `timm.list_models()`, `torchvision/<name>`, or `resnet-small`, three blocks
            for small pictures and few cores.
        dims: Number of non-negative dimensions.
        hidden_dim: Width of the projector's hidden layer; None for a linear head.
        activation: See `NonNegHead`, as `batch_norm`, `density` and `k`.
        size: Side of the pictures. ResNets get the CIFAR stem (a 3x3 convolution, no pooling) up
            to 64.
        pretrained: Start from the library's own weights.

    Example:
        >>> model = NonNegVision("resnet-small", dims=64, hidden_dim=None)
        >>> codes = model.encode(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        >>> codes.shape
        (2, 64)
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: str = "resnet18",
        *,
        dims: int = 256,
        hidden_dim: int | None = 2048,
        activation: Activation = "relu",
        batch_norm: bool = True,
        density: float | None = None,
        k: int | None = None,
        size: int = 32,
        pretrained: bool = False,
    ):
        super().__init__()
        self.size = size
        self.encoder = backbone(model, size, pretrained)
        self.head = NonNegHead(
            _width(self.encoder, size),
            dims,
            hidden_dim=hidden_dim,
            activation=activation,
            batch_norm=batch_norm,
            density=density,
            k=k,
        )
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)

    def forward(self, x: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n dims"]:
        """Codes of pictures whose values lie in [0, 1]."""
        return self.head(self.features(x))

    def features(self, x: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n features"]:
        """The encoder's output, before the head."""
        x = ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        return self.encoder(x)

    @torch.inference_mode()
    def embed(
        self, images: Any, *, batch_size: int = 256
    ) -> tuple[Float[Tensor, "n features"], Float[Tensor, "n dims"]]:
        """The encoder's and the head's output for pictures, on the CPU.

        Args:
            images: uint8 pictures (n, channels, height, width), or a list of PIL pictures, or
                anything that gives such a tensor for a slice.
            batch_size: Pictures at once.
        """
        from tqdm.auto import tqdm

        training = self.training
        self.eval()
        starts = range(0, len(images), batch_size)
        encoded, codes = [], []
        for start in tqdm(
            starts, desc="encode", unit="batch", leave=False, disable=len(starts) < 20
        ):
            h = self.features(self._prepared(images[start : start + batch_size]))
            encoded.append(h.float().cpu())
            codes.append(self.head(h).float().cpu())
        self.train(training)
        return torch.cat(encoded), torch.cat(codes)

    def encode(self, images: Any, *, batch_size: int = 256, dense: bool = False) -> Any:
        """Codes of unit length: a `scipy.sparse.csr_array`, or a tensor if `dense`."""
        z = self.embed(images, batch_size=batch_size)[1]
        return nn.functional.normalize(z, dim=1) if dense else to_csr(z)

    def _prepared(self, images: Tensor | Sequence[Image.Image]) -> Tensor:
        if not isinstance(images, Tensor):
            from ncl_multi.data.folders import square

            images = torch.stack([square(picture, self.size) for picture in images])
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"pictures must be uint8 of shape (n, 1 or 3, height, width); got "
                f"{images.dtype} {tuple(images.shape)}"
            )
        x = images.to(self.mean.device).expand(-1, 3, -1, -1).float() / 255
        if x.shape[2:] != (self.size, self.size):
            x = nn.functional.interpolate(
                x, (self.size, self.size), mode="bilinear", antialias=True
            ).clamp(0, 1)
        return x


class NonNegClassifier(NonNegVision):
    """A `NonNegVision` that learns from labels: its codes are what a linear classifier reads.

    With a signed head (`activation="none"`) the loss is plain cross entropy, with a non-negative
    one it is the paper's NCE. `classes` is the number of classes.
    """

    def __init__(
        self,
        model: str = "resnet18",
        *,
        classes: int,
        dims: int = 256,
        hidden_dim: int | None = None,
        activation: Activation = "relu",
        size: int = 32,
    ):
        super().__init__(model, dims=dims, hidden_dim=hidden_dim, activation=activation, size=size)
        self.classifier = NonNegCrossEntropy(dims, classes)

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "n 3 height width"], y: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "n dims"]]:
        """The loss, and the codes it was computed from."""
        z = self.head(self.features(x))
        return self.classifier(z, y), z

    def predict(self, images: Any, *, batch_size: int = 256) -> Int[Tensor, " n"]:
        """The likeliest class of each picture."""
        z = self.embed(images, batch_size=batch_size)[1]
        return (z @ self.classifier.weight.detach().cpu().T).argmax(1)


def backbone(name: str, size: int, pretrained: bool = False) -> nn.Module:
    """An encoder without its classifier."""
    if name.startswith("torchvision/"):
        model = _from_torchvision(name.removeprefix("torchvision/"), pretrained)
    elif name == "resnet-small":
        model = _small_resnet()
    elif timm.is_model(name):
        known = timm.get_pretrained_cfg(name)
        fixed: dict[str, Any] = {"img_size": size} if known and known.fixed_input_size else {}
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
    """SimCLR's optimiser, for `fit`: a learning rate for 256 rows, biases and norms left alone."""

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
    """Three residual blocks of 64, 128 and 256 channels, the first on 8x8 of 32x32 pixels."""
    from timm.models.resnet import BasicBlock, ResNet

    block: Any = BasicBlock
    model: Any = ResNet(
        block, (1, 1, 1, 1), num_classes=0, channels=(32, 64, 128, 256), stem_type="deep",
        stem_width=16,
    )  # fmt: skip
    model.conv1 = nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False)
    model.maxpool, model.layer1 = nn.Identity(), nn.Identity()
    return model


def _from_torchvision(name: str, pretrained: bool) -> nn.Module:
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise ValueError(f"torchvision has no model {name!r}; see torchvision.models.list_models()")
    model = get_model(name, weights="DEFAULT" if pretrained else None)
    for last in ("fc", "classifier", "heads", "head"):
        if hasattr(model, last):
            setattr(model, last, nn.Identity())
            return model
    raise ValueError(f"torchvision's {name} has no classifier to take off; use a timm model")


def _width(encoder: nn.Module, size: int) -> int:
    """Features the encoder gives, found by asking it."""
    encoder.eval()
    with torch.no_grad():
        width = encoder(torch.zeros(1, 3, size, size)).shape[-1]
    encoder.train()
    return width
