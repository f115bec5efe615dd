"""open_clip: a loss with its contract, for its own trainer or yours.

The model returns unit features; ReLU of a unit row points where ReLU of the raw row does, and
`info_nce` normalises again, so the line can be in the loss.
"""

import open_clip
import torch
from torch import nn

from ncl_multi import info_nce


class NonNegClipLoss(nn.Module):
    """Takes what open_clip's `ClipLoss` takes and returns what it returns."""

    def forward(self, image_features, text_features, logit_scale, output_dict=False):
        image, text = image_features.relu(), text_features.relu()  # <- the line
        loss = info_nce(image, text, temperature=1 / logit_scale, distributed=True)
        return {"contrastive_loss": loss} if output_dict else loss


if __name__ == "__main__":
    torch.manual_seed(0)
    model = open_clip.CLIP(
        embed_dim=64,
        vision_cfg=open_clip.CLIPVisionCfg(layers=2, width=64, image_size=32, patch_size=8),
        text_cfg=open_clip.CLIPTextCfg(width=64, heads=2, layers=2),
        output_dict=True,
    )
    images = torch.randn(16, 3, 32, 32)
    texts = open_clip.tokenize([f"picture number {i}" for i in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        loss = NonNegClipLoss()(**model(images, texts), output_dict=True)["contrastive_loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.2f}")
