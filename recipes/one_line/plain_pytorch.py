"""Plain PyTorch: SimCLR on handwritten digits, non-negative by one line."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ncl_multi import NonNegHead, info_nce

torch.manual_seed(0)
x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128))
head = NonNegHead(128, 256, density=0.1)  # <- the line: it was nn.Linear(128, 256)
model = nn.Sequential(encoder, head)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(100):
    batch = x[torch.randint(len(x), (256,))]
    za, zb = (model(batch + 0.2 * torch.randn_like(batch)) for _ in range(2))
    loss = info_nce(za, zb, within_view=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

z = model.eval()(x)
print(f"loss {loss.item():.2f}, active {(z > 0).float().mean():.1%}")
