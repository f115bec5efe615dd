"""From features of two towers to codes in one space, and the loss that trains them."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ncl_multi.head import Activation, NonNegHead, joined_clusters, top_k
from ncl_multi.losses import InfoNCE, imitation_and_contrast, info_nce, normalize_rows, spectral

Scalar = Float[Tensor, ""]
_SQUARED_LENGTH = 16.0
"""Squared length of rows in the spectral loss. Values from 5 to 40 give about the same results."""


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
        k: Keep the k largest entries of a row, once trained; in training codes are not cut, and
            `loss` trains both whole and cut codes.
        spectral: Weight of the spectral loss that is added to InfoNCE; see `loss`. It makes
            dimensions purer and more alike over seeds, where InfoNCE makes them retrieve.
        contrast: Weight of InfoNCE and of the imitation of whole codes by cut ones; 0 trains with
            the spectral loss only.
        dropout: Share of the towers' features that is dropped in training. With few pairs, sparse
            heads overfit without it.
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
        contrast: float = 1.0,
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
        if min(spectral, contrast) < 0 or spectral == contrast == 0:
            raise ValueError(
                f"spectral and contrast must be at least 0, and not both 0; got {spectral} and "
                f"{contrast}"
            )
        options: dict[str, Any] = {
            "hidden_dim": hidden_dim, "activation": activation, "density": density,
        }  # fmt: skip
        if k is not None and not 1 <= k <= dims:
            raise ValueError(f"k must lie in 1..{dims}, the heads' width; got {k}")
        self.image = NonNegHead(image_dim, dims, **options)
        self.text = None if shared else NonNegHead(text_dim, dims, **options)
        self.contrast = InfoNCE(temperature, learnable=True, min_temperature=min_temperature)
        self.dropout, self.k = dropout, k
        self.spectral, self.contrast_weight = spectral, contrast
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
        """Subtract the mean of these features from all later ones.

        Dropout of features with a large mean would mostly drop the mean.
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
        Each head starts on its half of the centres of `joined_clusters`, so that from the first
        step a dimension fires for the same things in images and in texts. A shared head starts on
        clusters of both sides in one space.
        """
        image, caption = links.T.to(h_image.device)
        paired = (_unit(h_text) - self.text_mean)[caption]
        total = paired.new_zeros(len(h_image), paired.shape[1]).index_add_(0, image, paired)
        sides = F.normalize(_unit(h_image) - self.image_mean, dim=1), F.normalize(total, dim=1)
        if self.text is None:
            self.image.start_at(joined_clusters(torch.cat(sides), self.image.out_dim))
            return
        centres = joined_clusters(torch.cat(sides, dim=1), self.image.out_dim)
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
        `spectral` times `spectral_of_cosines` of the cut codes, and the same of the whole ones.

        Processes that train together each pass their own rows, and get the loss of all of them.
        """

        def spectral_part(za: Tensor, zb: Tensor) -> Tensor | float:
            return self.spectral and self.spectral * spectral_of_cosines(za, zb, _SQUARED_LENGTH)

        whole, contrast = (z_image, z_text), self.contrast_weight
        # Also at a weight of zero: DDP fails on an unused temperature.
        contrasted = info_nce(*whole, temperature=temperature, groups=groups, distributed=True)
        loss = contrast * contrasted + spectral_part(*whole)
        if self.k is None:
            return loss
        k = self.k

        def of_cut(*sides: Tensor) -> Tensor:
            za, zb = (top_k(side, k) for side in sides)
            imitated, contrasted = imitation_and_contrast(
                (za, zb), whole, temperature, groups=groups, distributed=True
            )
            return contrast * (imitated + contrasted) + spectral_part(za, zb)

        # Wide codes take most of the memory: they are cut again in the backward pass, not stored.
        return loss + checkpoint(of_cut, *whole, use_reentrant=False, preserve_rng_state=False)

    def _serve(self, z: Tensor) -> Tensor:
        return z if self.training or self.k is None else top_k(z, self.k)

    def _prepare(self, h: Tensor, mean: Tensor) -> Tensor:
        return F.dropout(_unit(h) - mean, self.dropout, self.training)


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
    za, zb = (normalize_rows(z, distributed=True) * squared_length**0.5 for z in (za, zb))
    return spectral(za, zb, distributed=True) / squared_length


def _unit(h: Tensor) -> Tensor:
    """Rows of one length, such that an entry is about 1 in size."""
    return F.normalize(h.float(), dim=1) * h.shape[1] ** 0.5
