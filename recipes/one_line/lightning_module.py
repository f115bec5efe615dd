"""Lightning: the same in a LightningModule; with `distributed`, all devices' rows are negatives."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ncl_multi import NonNegHead, info_nce


class SimCLR(lightning.LightningModule):
    """SimCLR with noise as its augmentation."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128))
        self.head = NonNegHead(128, 256, density=0.1)  # <- the line: it was nn.Linear(128, 256)

    def forward(self, x):
        return self.head(self.encoder(x))

    def training_step(self, batch):
        (x,) = batch
        za, zb = self(torch.cat([x, x]) + 0.2 * torch.randn(2 * len(x), 64).to(x)).chunk(2)
        return info_nce(za, zb, within_view=True, distributed=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(x), batch_size=256, shuffle=True, drop_last=True)
    model = SimCLR()
    trainer = lightning.Trainer(
        max_epochs=15,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, loader)
    z = model.eval()(x)
    print(f"active {(z > 0).float().mean():.1%}")
