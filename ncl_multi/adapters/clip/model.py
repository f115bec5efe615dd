"""Non-negative CLIP: images and texts in one sparse, readable space.

Example:
    model = NonNegClip("ViT-B-32:laion2b_s34b_b79k", dims=2048, k=16).fit(pairs)
    model.encode(["a dog on grass"])  # scipy.sparse.csr_array, unit rows
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ncl_multi.adapters.clip.config import ClipConfig
from ncl_multi.adapters.clip.inputs import PixelPairs, TowerFeatures, tower_features
from ncl_multi.adapters.clip.load import DEMO, load_towers
from ncl_multi.adapters.clip.pairs import Pairs, as_pairs
from ncl_multi.adapters.clip.towers import Pixels, Tokens, Towers
from ncl_multi.data.fetch import cache as user_cache
from ncl_multi.data.pictures import thumbnail
from ncl_multi.distributed import gather
from ncl_multi.head import Activation, NonNegHead, k_means, top_k
from ncl_multi.losses import InfoNCE, imitation, info_nce, spectral
from ncl_multi.model import SparseModel

try:
    from PIL import Image
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("needs pillow: pip install 'ncl-multi[clip]'") from error

Scalar = Float[Tensor, ""]
_SQUARED_LENGTH = 16.0
"""Of rows in the spectral part of the loss. From 5 to 40 it hardly matters."""
_WHOLE_SHARE = 0.3
"""Of the spectral part's weight, for whole codes: there it makes dimensions purer, at a cost in
retrieval; on cut codes it does not cost any."""


_DEFAULTS: dict[str, Any] = {
    "spectral": 10.0, "dropout": 0.5, "temperature": 0.05, "min_temperature": 0.03,
}  # fmt: skip


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
        spectral: Weight of the spectral loss that is added to InfoNCE; see `loss`. It makes
            dimensions purer and more alike over seeds, where InfoNCE makes them retrieve.
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
        spectral: float = 0.0,
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
        if spectral < 0:
            raise ValueError(f"spectral must be at least 0; got {spectral}")
        options: dict[str, Any] = {
            "hidden_dim": hidden_dim, "activation": activation, "density": density,
        }  # fmt: skip
        if k is not None and not 1 <= k <= dims:
            raise ValueError(f"k must lie in 1..{dims}, the heads' width; got {k}")
        self.image = NonNegHead(image_dim, dims, **options)
        self.text = None if shared else NonNegHead(text_dim, dims, **options)
        self.contrast = InfoNCE(temperature, learnable=True, min_temperature=min_temperature)
        self.dropout, self.k, self.spectral = dropout, k, spectral
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

    @torch.no_grad()
    def start_on_clusters(
        self,
        h_image: Float[Tensor, "n i"],
        h_text: Float[Tensor, "m t"],
        links: Int[Tensor, "pairs 2"],
    ) -> None:
        """Let each dimension start on one cluster of pairs, after `centre`.

        A pair is an image next to the mean of its captions; `links` are rows of (image, caption).
        Each head starts on its half of the centres of `k_means`, so that from the first step a
        dimension fires for the same things in images and in texts. A shared head starts on clusters
        of both sides in one space.
        """
        image, caption = links.T.to(h_image.device)
        said = (_unit(h_text) - self.text_mean)[caption]
        total = said.new_zeros(len(h_image), said.shape[1]).index_add_(0, image, said)
        sides = F.normalize(_unit(h_image) - self.image_mean, dim=1), F.normalize(total, dim=1)
        if self.text is None:
            self.image.start_on(torch.cat(sides), "clusters")
            return
        centres = k_means(torch.cat(sides, dim=1), self.image.out_dim)
        width = h_image.shape[1]
        self.image.start_at(centres[:, :width])
        self.text.start_at(centres[:, width:])

    def loss(
        self,
        z_image: Float[Tensor, "n dims"],
        z_text: Float[Tensor, "n dims"],
        temperature: Scalar,
        groups: Int[Tensor, " n"] | None = None,
    ) -> Scalar:
        """InfoNCE of codes and, if there is a `k`, of the same codes cut to it.

        Cut codes have fewer entries to generalise with, so they also learn from the whole ones
        how near each image is to the texts of the others. The spectral part is the weight
        `spectral` times `spectral_of_cosines` of the cut codes, and 0.3 of it of the whole ones.
        """

        def contrast(za: Tensor, zb: Tensor, share: float = 1.0) -> Tensor:
            loss = info_nce(za, zb, temperature=temperature, groups=groups)
            if self.spectral == 0:
                return loss
            weight = share * self.spectral
            return loss + weight * spectral_of_cosines(za, zb, _SQUARED_LENGTH)

        if self.k is None:
            return contrast(z_image, z_text, _WHOLE_SHARE)
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
        return loss + of_cut(contrast) + contrast(*whole, _WHOLE_SHARE)

    def _serve(self, z: Tensor) -> Tensor:
        return z if self.training or self.k is None else top_k(z, self.k)

    def _prepare(self, h: Tensor, mean: Tensor) -> Tensor:
        return F.dropout(_unit(h) - mean, self.dropout, self.training)


class NonNegClip(
    SparseModel,
    library_name="ncl_multi",
    tags=["clip", "non-negative-contrastive-learning", "sparse-embeddings"],
    paper_url="https://arxiv.org/abs/2403.12459",
):
    """Two towers and their non-negative heads: images and texts in one sparse space.

    `fit` takes `Pairs`, or a list of (image, caption) with images as PIL images, files or bytes and
    one caption or several. The towers stay frozen unless the config says `finetune`. `encode`
    takes texts (`str`) or images (PIL, `Path`).

    Args:
        towers: A name, see `load_towers`, or `Towers` of your own.
        dims: Number of non-negative dimensions.
        seed: Of the weights the heads start with.
        options: Of `ClipHeads`. Unless they are given, k is 16, the spectral loss weighs 10, half
            of the features are dropped in training, and the temperature starts at .05, not below
            .03.
    """

    kind = "clip"
    config_type = ClipConfig

    def __init__(
        self, towers: str | Towers = DEMO, dims: int = 1024, *, seed: int = 0, **options: Any
    ):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.towers = load_towers(towers) if isinstance(towers, str) else towers
            widths = self.towers.image_dim, self.towers.text_dim
            options = _DEFAULTS | {"k": min(16, dims)} | options
            self.heads = ClipHeads(*widths, dims, **options)

    def forward(
        self, pixels: Pixels, tokens: Tokens
    ) -> tuple[Float[Tensor, "n dims"], Float[Tensor, "n dims"], Scalar]:
        return self.heads(self.towers.image(pixels), self.towers.text(tokens))

    def options(self) -> dict[str, Any]:
        heads = self.heads
        head = heads.image.options
        return {
            "dims": head.dims, "hidden_dim": head.hidden_dim, "activation": head.activation,
            "density": head.density, "shared": heads.text is None, "k": heads.k,
            "spectral": heads.spectral, "dropout": heads.dropout,
            "min_temperature": heads.contrast.min_temperature,
        }  # fmt: skip

    def tower_features(self, pairs: Pairs, config: ClipConfig, views: int = 1) -> TowerFeatures:
        """What the towers give for all images and captions, from the cache where it has them."""
        best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device(config.device or best or "cpu")
        # Features of towers that are being trained are of no use to another run.
        own = config.out if config.finetune else None
        cache = config.cache or (own / "cache" if own else user_cache() / "clip")
        return tower_features(self.towers, pairs, cache, views=views, device=device)

    @classmethod
    def _build(cls, options: dict[str, Any], folder: Path, **given: Any) -> "NonNegClip":
        if given:
            raise TypeError(f"NonNegClip takes no option {', '.join(given)}")
        # Version 0.1 kept the options of the heads by themselves.
        options = options | options.pop("options", {})
        return cls(Towers.load(folder / "towers"), **options)

    def _save_parts(self, folder: Path) -> None:
        self.towers.save(folder / "towers")
        super()._save_parts(folder)

    def _became_signed(self) -> None:
        self.heads.k = None

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        from ncl_multi.training import fit as loop

        pairs = as_pairs(data)
        if config.rows_seen is not None:
            pairs = pairs.at_most(config.rows_seen)
        if len(pairs) < 2:
            raise ValueError(f"training needs at least two images with captions; got {len(pairs)}")
        inputs: TowerFeatures | PixelPairs
        if config.finetune:
            inputs = PixelPairs(pairs, self.towers)
        else:
            inputs = self.tower_features(pairs, config, config.views)
            self.heads.centre(inputs.image[0], inputs.text)
            if config.start == "clusters" and self.heads.image.hidden_dim is None:
                self.heads.start_on_clusters(inputs.image[0], inputs.text, inputs.pairs.links)
        size = min(config.batch_size, len(inputs))
        rows: Any = inputs
        loader = DataLoader(rows, size, num_workers=config.workers, drop_last=True)
        objective = ClipObjective(self if config.finetune else self.heads, inputs)
        loop.fit(objective, loader, config, fingerprint=pairs.fingerprint())
        self.heads.to(next(objective.parameters()).device)
        self.towers.to(self.device)
        return {"data": pairs.name, "images": len(pairs), "captions": len(pairs.captions)}

    def _embedded(self, items: Any, batch_size: int | None, progress: bool) -> Iterator[Tensor]:
        texts = _are_texts(items)
        size = batch_size or (256 if texts else 64)
        starts = range(0, len(items), size)
        for start in tqdm(starts, desc="encode", unit="batch", leave=False, disable=not progress):
            some = items[start : start + size]
            with torch.inference_mode():
                if texts:
                    yield self.towers.text(self.towers.tokens(some).to(self.device))
                else:
                    pixels = torch.stack([self.towers.pixels(_open(image)) for image in some])
                    yield self.towers.image(pixels.to(self.device))

    def _head(self, items: Any) -> Any:
        return self.heads.encode_text if _are_texts(items) else self.heads.encode_image

    def _shown(self, items: Any) -> dict[str, Any]:
        if _are_texts(items):
            return {"items": list(items)}
        return {"thumbnails": [thumbnail(_open(image), "JPEG", 96) for image in items]}


class ClipObjective(nn.Module):
    """The loss of a batch of pairs: each image in one view, with one of its captions.

    Args:
        model: `ClipHeads` on features of frozen towers, or a whole `NonNegClip` on pixels.
        inputs: Where batches of features, or of pixels and tokens, are drawn from.
    """

    model: Any

    def __init__(self, model: nn.Module, inputs: TowerFeatures | PixelPairs):
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss, and the images' codes."""
        image, text, groups = self.inputs.draw(batch)
        z_image, z_text, temperature = self.model(image, text)
        heads = self.model if isinstance(self.model, ClipHeads) else self.model.heads
        return heads.loss(gather(z_image), gather(z_text), temperature, gather(groups)), z_image


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


def spectral_of_cosines(
    za: Float[Tensor, "n d"], zb: Float[Tensor, "n d"], squared_length: float
) -> Scalar:
    """squared_length * E cos(x, x-)^2 - 2 E cos(x, x+): `spectral` of rows of one length.

    Codes are compared by cosine, so lengths are not left free. Divided by `squared_length`, so
    that the pull of a partner weighs the same at any length.

    Example:
        >>> spectral_of_cosines(torch.eye(3), 7 * torch.eye(3), 10.0)
        tensor(-2.)
    """
    za, zb = (F.normalize(z, dim=1) * squared_length**0.5 for z in (za, zb))
    return spectral(za, zb) / squared_length


def _unit(h: Tensor) -> Tensor:
    """Rows of one length, such that an entry is about 1 in size."""
    return F.normalize(h.float(), dim=1) * h.shape[1] ** 0.5


def _are_texts(items: Any) -> bool:
    """Whether items are texts; a mixture, or one text without a list, is refused."""
    if isinstance(items, str | bytes | Path):
        raise ValueError(f"encode takes a list of texts or of images; got {items!r}")
    kinds = [isinstance(item, str) for item in items]
    if any(kinds) and not all(kinds):
        row = kinds.index(not kinds[0])
        raise ValueError(
            f"items must be all texts or all images; row {row} is a {type(items[row]).__name__}"
        )
    return bool(kinds) and kinds[0]


def _open(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    with Image.open(image) as opened:
        return opened.convert("RGB")
