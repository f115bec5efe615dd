"""Non-negative CLIP: images and texts in one sparse, readable space.

Example:
    model = NonNegClip("ViT-B-32:laion2b_s34b_b79k", dims=4096, density=0.1)
    z_image, z_text, temperature = model(pixels, tokens)
    model.encode_text(["a dog on grass"])  # scipy.sparse.csr_array, unit rows
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_model, save_model
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ncl_multi.adapters.clip.load import DEMO, load_towers
from ncl_multi.adapters.clip.towers import Pixels, Tokens, Towers
from ncl_multi.codes.features import to_csr
from ncl_multi.distributed import gather
from ncl_multi.files import atomic
from ncl_multi.head import Activation, NonNegHead, top_k
from ncl_multi.losses import InfoNCE, imitation, info_nce

try:
    from huggingface_hub import ModelCard, PyTorchModelHubMixin, snapshot_download
    from PIL import Image
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "needs huggingface_hub and pillow: pip install 'ncl-multi[clip]'"
    ) from error

Scalar = Float[Tensor, ""]


class ClipHeads(nn.Module):
    """From features of two towers to codes in one space.

    This is all that is trained when the towers are frozen, so it takes features, not pixels.

    Args:
        image_dim: Width of the image tower's features.
        text_dim: Width of the text tower's features.
        dims: Number of non-negative dimensions.
        shared: One head for both sides, which must then be equally wide.
        hidden_dim: Width of a hidden layer in each head; None for linear heads.
        activation: See `NonNegHead`; `none` is the signed twin.
        density: See `NonNegHead`.
        k: Keep the k largest entries of a row, once trained; in training codes come out whole, and
            `loss` makes them good at both.
        dropout: Share of the towers' features that is dropped in training. With few pairs, sparse
            heads learn them by heart without it.
        temperature: Where the learnt temperature starts.
        min_temperature: Its floor, one over the cap of CLIP's logit scale.
    """

    image_mean: Tensor
    text_mean: Tensor

    def __init__(
        self,
        image_dim: int,
        text_dim: int,
        dims: int,
        *,
        shared: bool = False,
        hidden_dim: int | None = None,
        activation: Activation = "relu",
        density: float | None = None,
        k: int | None = None,
        dropout: float = 0.0,
        temperature: float = 0.07,
        min_temperature: float = 0.01,
    ):
        super().__init__()
        if shared and image_dim != text_dim:
            raise ValueError(
                f"a shared head needs towers of one width; got {image_dim} for images and "
                f"{text_dim} for texts. Use shared=False"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1); got {dropout}")
        options: dict[str, Any] = {
            "hidden_dim": hidden_dim, "activation": activation, "density": density,
        }  # fmt: skip
        if k is not None and not 1 <= k <= dims:
            raise ValueError(f"k must lie in 1..{dims}, the heads' width; got {k}")
        self.image = NonNegHead(image_dim, dims, **options)
        self.text = None if shared else NonNegHead(text_dim, dims, **options)
        self.contrast = InfoNCE(temperature, learnable=True, min_temperature=min_temperature)
        self.dropout, self.k = dropout, k
        self.register_buffer("image_mean", torch.zeros(image_dim))
        self.register_buffer("text_mean", torch.zeros(text_dim))

    def forward(
        self, h_image: Float[Tensor, "n i"], h_text: Float[Tensor, "n t"]
    ) -> tuple[Float[Tensor, "n dims"], Float[Tensor, "n dims"], Scalar]:
        """Codes of both sides, not normalised, and the temperature."""
        if self.text is None:
            # In one pass, so that both sides are standardised by the same moments.
            sides = self._prepare(h_image, self.image_mean), self._prepare(h_text, self.text_mean)
            both = self._serve(self.image(torch.cat(sides)))
            z_image, z_text = both[: len(h_image)], both[len(h_image) :]
        else:
            z_image, z_text = self.encode_image(h_image), self.encode_text(h_text)
        return z_image, z_text, self.contrast.temperature

    def encode_image(self, h: Float[Tensor, "n i"]) -> Float[Tensor, "n dims"]:
        """Codes of image features."""
        return self._serve(self.image(self._prepare(h, self.image_mean)))

    def encode_text(self, h: Float[Tensor, "n t"]) -> Float[Tensor, "n dims"]:
        """Codes of text features."""
        head = self.image if self.text is None else self.text
        return self._serve(head(self._prepare(h, self.text_mean)))

    @torch.no_grad()
    def centre(self, h_image: Float[Tensor, "n i"], h_text: Float[Tensor, "m t"]) -> None:
        """Take the mean of these features off all that follow.

        Of features with a large mean, dropout would mostly drop what they have in common.
        """
        self.image_mean.copy_(_unit(h_image).mean(dim=0))
        self.text_mean.copy_(_unit(h_text).mean(dim=0))

    def loss(
        self,
        z_image: Float[Tensor, "n dims"],
        z_text: Float[Tensor, "n dims"],
        temperature: Scalar,
        groups: Int[Tensor, " n"] | None = None,
    ) -> Scalar:
        """InfoNCE of codes and, if there is a `k`, of the same codes cut to it.

        Cut codes have fewer entries to generalise with, so they also learn from the whole ones
        how near each image is to the texts of the others.
        """
        contrast = partial(info_nce, temperature=temperature, groups=groups)
        if self.k is None:
            return contrast(z_image, z_text)
        k, whole = self.k, (z_image, z_text)

        def of_cut(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            # Wide codes take the most room, so they are cut again in the backward, not kept.
            return checkpoint(
                lambda *z: loss(*(top_k(side, k) for side in z)),
                *whole,
                use_reentrant=False,
                preserve_rng_state=False,
            )

        loss = of_cut(lambda *cut: imitation(cut, whole, temperature))
        return loss + of_cut(contrast) + contrast(*whole)

    def _serve(self, z: Tensor) -> Tensor:
        return z if self.training or self.k is None else top_k(z, self.k)

    def _prepare(self, h: Tensor, mean: Tensor) -> Tensor:
        return F.dropout(_unit(h) - mean, self.dropout, self.training)


class NonNegClip(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="ncl_multi",
    tags=["clip", "sparse", "non-negative", "interpretability"],
):
    """Two towers and their non-negative heads.

    `towers` is a name, see `load_towers`, or `Towers` of one's own. `dims` is the width of the
    codes; None takes `expansion` times the wider tower. Other options are those of `ClipHeads`.
    To train the heads alone, pass `model.heads` and cached features to `fit`; to fine-tune
    everything, pass the model, pixels and tokens. Both return the same three things.
    """

    def __init__(
        self,
        towers: str | Towers = DEMO,
        dims: int | None = None,
        *,
        expansion: int | float = 4,
        **options: Any,
    ):
        super().__init__()
        self.towers = load_towers(towers) if isinstance(towers, str) else towers
        if dims is None:
            dims = round(expansion * max(self.towers.image_dim, self.towers.text_dim))
        self.dims, self.options = dims, options
        self.heads = ClipHeads(self.towers.image_dim, self.towers.text_dim, dims, **options)
        self.figures: dict[str, Any] = {}
        """What the model card says about the codes: the recipe puts its measurements here."""

    def forward(
        self, pixels: Pixels, tokens: Tokens
    ) -> tuple[Float[Tensor, "n dims"], Float[Tensor, "n dims"], Scalar]:
        return self.heads(self.towers.image(pixels), self.towers.text(tokens))

    def encode(self, items: Sequence[Any], **options: Any) -> csr_array | Tensor:
        """Codes of texts, if the items are strings, or of images."""
        texts = bool(items) and isinstance(items[0], str)
        return (self.encode_text if texts else self.encode_image)(items, **options)

    def encode_image(
        self, images: Sequence[Any], *, batch_size: int = 64, dense: bool = False
    ) -> csr_array | Tensor:
        """Codes of PIL images or image files (`Path`): unit rows, sparse unless `dense`."""
        batches = (
            self.heads.encode_image(
                self.towers.image(torch.stack([self.towers.pixels(_open(i)) for i in some]).to(at))
            )
            for some, at in self._batches(images, batch_size)
        )
        return self._collect(batches, dense)

    def encode_text(
        self, texts: Sequence[str], *, batch_size: int = 256, dense: bool = False
    ) -> csr_array | Tensor:
        """Codes of texts: unit rows, sparse unless `dense`."""
        if isinstance(texts, str):
            raise ValueError(f"texts must be a list of strings; got one string, {texts!r}")
        batches = (
            self.heads.encode_text(self.towers.text(self.towers.tokens(some).to(at)))
            for some, at in self._batches(texts, batch_size)
        )
        return self._collect(batches, dense)

    def _batches(
        self, items: Sequence[Any], batch_size: int
    ) -> Iterable[tuple[Sequence[Any], torch.device]]:
        device = self.heads.image.out.weight.device
        for start in range(0, len(items), batch_size):
            yield items[start : start + batch_size], device

    @torch.no_grad()
    def _collect(self, batches: Iterable[Tensor], dense: bool) -> csr_array | Tensor:
        training = self.training
        self.eval()
        try:
            none = torch.zeros(0, self.dims)
            z = torch.cat([none, *(F.normalize(z.float(), dim=1).cpu() for z in batches)])
        finally:
            self.train(training)
        return z if dense else to_csr(z)

    def _save_pretrained(self, save_directory: Path) -> None:
        self.towers.save(save_directory / "towers")
        config = {"dims": self.dims, "options": self.options, "figures": self.figures}
        with atomic(save_directory / "model.safetensors") as unfinished:
            save_model(self, str(unfinished))
        (save_directory / "config.json").write_text(json.dumps(config, indent=2, default=str))
        self.generate_model_card().save(save_directory / "README.md")

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", config: Any = None, **hub: Any
    ) -> "NonNegClip":
        folder = Path(model_id)
        if not folder.is_dir():
            known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
            asked = {name: hub[name] for name in known if name in hub}
            folder = Path(snapshot_download(model_id, **asked))
        if not (folder / "towers").is_dir():
            raise ValueError(f"{model_id} was not saved by NonNegClip: it has no folder `towers`")
        kept = json.loads((folder / "config.json").read_text())
        model = cls(Towers.load(folder / "towers"), kept["dims"], **kept["options"])
        model.figures = kept["figures"]
        load_model(model, folder / "model.safetensors", device=map_location)
        return model.eval()

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """What the model is, how to use it, and how sparse its codes are."""
        data = self._hub_mixin_info.model_card_data.to_yaml()
        rows = "\n".join(f"| {name} | {value} |" for name, value in self.figures.items())
        measured = f"| measure | value |\n|---|---|\n{rows}" if rows else "Not measured yet."
        return ModelCard(
            _CARD.format(
                data=data,
                towers=self.towers.name,
                dims=self.dims,
                options=", ".join(f"{name}={value}" for name, value in self.options.items()),
                measured=measured,
            )
        )


class NonNegClipLoss(nn.Module):
    """NCL's loss in open_clip's contract, for open_clip's own trainer.

    It rectifies what it is given, so a stock open_clip model trained with it has the codes
    `relu(image_features)`; codes of a `NonNegClip` pass unchanged. Gathers with exact gradients.
    """

    def forward(
        self,
        image_features: Float[Tensor, "n d"],
        text_features: Float[Tensor, "n d"],
        logit_scale: Scalar | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Scalar | dict[str, Scalar]:
        """A `logit_bias` adds the same to every logit, so it changes nothing here."""
        za, zb = (gather(z.relu()) for z in (image_features, text_features))
        loss = info_nce(za, zb, temperature=1 / logit_scale)
        return {"contrastive_loss": loss} if output_dict else loss


def _unit(h: Tensor) -> Tensor:
    """Rows of one length, such that an entry is about 1 in size."""
    return F.normalize(h.float(), dim=1) * h.shape[1] ** 0.5


def _open(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    with Image.open(image) as opened:
        return opened.convert("RGB")


_CARD = """---
{data}
---

# Non-negative CLIP

Images and texts as sparse non-negative codes of {dims} dimensions in one space, on the towers
`{towers}`. A dimension fires for one thing, in pictures and in words, so a match can be taken apart
into the dimensions that both sides share.

Heads: {options}.

```python
from ncl_multi.adapters.clip.model import NonNegClip

model = NonNegClip.from_pretrained("<this folder or repository>")
codes = model.encode_text(["a dog on grass"])  # scipy.sparse.csr_array, unit rows
```

## Measured

{measured}
"""
