"""Other short or sparse codes, compared with `SparseCoder` at equal active entries.

Each takes embeddings to fit on and a number of entries k, and gives a function from embeddings to
codes with at most k entries. `embed_texts` makes the embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.head import k_means, top_k

Code = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Budget:
    """What every competitor may use: the width of codes, training steps and a seed.

    Without a learning rate each takes its own of `LEARNING_RATES`.
    """

    dims: int = 2048
    steps: int = 300
    batch_size: int = 256
    learning_rate: float | None = None
    seed: int = 0


LEARNING_RATES = {"csr": 2e-3, "autoencoder": 2e-3}
"""Chosen on docstrings by `evals/embeddings.py docstrings --learning-rate`."""


def embed_texts(path: Path, texts: list[str]) -> np.ndarray:
    """MiniLM's embeddings of these texts, from the file if it is there."""
    from sentence_transformers import SentenceTransformer

    from ncl_multi.data import minilm

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, SentenceTransformer(str(minilm()), device="cpu").encode(texts))
    x = np.load(path)
    if len(x) != len(texts):
        raise ValueError(f"{path} has {len(x)} rows, not {len(texts)}; delete it")
    return x


def truncation(x: Tensor, k: int, budget: Budget) -> Code:
    """The first k dimensions."""
    return lambda h: h[:, :k]


def pca(x: Tensor, k: int, budget: Budget) -> Code:
    """The first k principal components."""
    mean = x.mean(dim=0)
    axes = torch.linalg.eigh((x - mean).T @ (x - mean)).eigenvectors.flip(1)[:, :k]
    return lambda h: (h - mean) @ axes


def nmf(x: Tensor, k: int, budget: Budget) -> Code:
    """scikit-learn's NMF of the positive and the negative parts, the k largest entries."""
    whole = _nmf(x, budget)
    return lambda h: top_k(whole(h), k)


@lru_cache(maxsize=1)
def _nmf(x: Tensor, budget: Budget, components: int = 256) -> Code:
    """Whole codes, the same for every k: fitted once."""
    from sklearn.decomposition import MiniBatchNMF

    def parts(h: Tensor) -> Any:
        unit = F.normalize(h, dim=1)
        return torch.cat([unit.relu(), (-unit).relu()], dim=1).numpy()

    model = MiniBatchNMF(
        min(components, budget.dims, len(x)), batch_size=1024, max_iter=30,
        random_state=budget.seed, tol=0.0, max_no_improvement=None,
    ).fit(parts(x))  # fmt: skip
    return lru_cache(lambda h: torch.from_numpy(model.transform(parts(h))).float())


def one_hot(x: Tensor, k: int, budget: Budget) -> Code:
    """The k nearest of k-means' centres, all with the same weight."""
    soft = soft_clusters(x, k, budget)
    return lambda h: (soft(h) > 0).float()


def soft_clusters(x: Tensor, k: int, budget: Budget) -> Code:
    """The cosines to the k nearest of k-means' centres; as many centres as a third of the rows."""
    centres = _centres(x, min(budget.dims, max(k, len(x) // 3)), budget.seed)
    return lambda h: top_k((F.normalize(h, dim=1) @ centres.T).relu(), k)


@lru_cache(maxsize=1)
def _centres(x: Tensor, count: int, seed: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return F.normalize(k_means(F.normalize(x, dim=1), count), dim=1)


def csr(x: Tensor, k: int, budget: Budget) -> Code:
    """CSR of sentence-transformers, trained for this k on rows and their neighbours."""
    from ncl_multi.adapters.sentence.objective import SparseAutoencoder
    from ncl_multi.training.neighbours import Neighbours

    near = Neighbours(x, 16)

    def step(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        return model([x[rows[:, 0]], x[near.of(rows[:, 0])]])

    model = _trained(SparseAutoencoder, step, x, k, budget, LEARNING_RATES["csr"])
    return lambda h: top_k(model.codes(h), k)


def autoencoder(x: Tensor, k: int, budget: Budget) -> Code:
    """A TopK autoencoder, trained for this k."""

    def step(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        return model(x[rows[:, 0]])

    model = _trained(TopKAutoencoder, step, x, k, budget, LEARNING_RATES["autoencoder"])
    return lambda h: top_k(model.codes(h), k)


METHODS: dict[str, Callable[..., Code]] = {
    "truncation": truncation, "pca": pca, "nmf": nmf, "k_means_one_hot": one_hot,
    "k_means_soft": soft_clusters, "csr": csr, "autoencoder": autoencoder,
}  # fmt: skip
DENSE = ("truncation", "pca")
"""Methods whose dimensions are the same k for every row: four bytes per entry, not six."""


class TopKAutoencoder(nn.Module):
    """Gao et al. 2024, arXiv 2406.04093: a shared bias, tied start, unit atoms, an auxiliary loss.

    The auxiliary term lets dimensions that are silent in a batch explain the remaining error.
    """

    def __init__(self, in_dim: int, dims: int, k: int):
        super().__init__()
        self.k = k
        self.encoder = nn.Linear(in_dim, dims)
        self.atoms = nn.Parameter(F.normalize(self.encoder.weight.detach().clone(), dim=1))
        self.bias = nn.Parameter(torch.zeros(in_dim))

    def codes(self, h: Tensor) -> Tensor:
        """Codes before they are cut."""
        with torch.no_grad():
            return F.relu(self.encoder(h - self.bias))

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and its codes."""
        atoms = F.normalize(self.atoms, dim=1)
        whole = F.relu(self.encoder(h - self.bias))
        z = top_k(whole, self.k)
        residual = h - self.bias - z @ atoms
        silent = (z > 0).sum(dim=0) == 0
        share = residual.square().sum() / (h - h.mean(dim=0)).square().sum()
        if silent.any():
            count = min(2 * self.k, int(silent.sum()))
            spare = top_k(whole * silent, count) @ atoms
            share = (
                share
                + F.mse_loss(spare, residual.detach()) / residual.detach().square().mean() / 32
            )
        return share, z


def _trained(build: Any, step: Any, x: Tensor, k: int, budget: Budget, rate: float) -> Any:
    """A model of embeddings to `dims` dimensions, trained by the library's loop."""
    from torch.utils.data import DataLoader

    from ncl_multi.training.batches import Rows
    from ncl_multi.training.config import TrainConfig
    from ncl_multi.training.fit import StepObjective, fit

    with torch.random.fork_rng():
        torch.manual_seed(budget.seed)
        model = build(x.shape[1], budget.dims, k)
    size = min(budget.batch_size, len(x))
    loader = DataLoader(
        Rows(torch.arange(len(x))[:, None]), size, collate_fn=Rows.together, drop_last=True
    )
    plan = TrainConfig(
        steps=budget.steps, batch_size=size, lr=budget.learning_rate or rate, seed=budget.seed,
        device="cpu", progress=False,
    )  # fmt: skip
    fit(StepObjective(model, step), loader, plan)
    return model.eval()
