"""The training step of CLIP, for `fit` and for open_clip's trainer."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ncl_multi.adapters.clip.heads import ClipHeads, Scalar
from ncl_multi.adapters.clip.inputs import PixelPairs, TowerFeatures
from ncl_multi.losses import info_nce


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
        return heads.loss(z_image, z_text, temperature, groups), z_image


class NonNegClipLoss(nn.Module):
    """NCL's loss in open_clip's contract, for open_clip's own trainer.

    It applies ReLU to its inputs, so a stock open_clip model trained with it has the codes
    `relu(image_features)`; codes of a `NonNegClip` pass unchanged. Processes split it,
    with exact gradients.
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
        za, zb = (z.relu() for z in (image_features, text_features))
        loss = info_nce(za, zb, temperature=1 / logit_scale, distributed=True)
        return {"contrastive_loss": loss} if output_dict else loss
