"""How graph models are trained, and the rule that derives settings from the graph."""

from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal, NamedTuple

from ncl_multi.training.config import TrainConfig

WHOLE = 35_000
"""Up to this many nodes a step encodes the whole graph, and all nodes are negatives."""
_WHOLE_EDGES = 4_000_000
"""And up to this many edges: a step keeps a few numbers per edge in memory."""


@dataclass(frozen=True)
class GraphConfig(TrainConfig):
    """How a `NonNegGraph` is trained. Settings that are None are set by `rule`."""

    loss: Literal["spectral", "info_nce"] = "spectral"
    """What the encoder's features learn from, and then the codes: `spectral` takes time linear in
    the nodes, `info_nce` (GRACE) quadratic. Both take all nodes of a step as negatives."""
    temperature: float = 0.4
    """Temperature of `info_nce`; a lower one gives the nearest negatives more weight."""
    reconstruction: float = 3.0
    """Weight of rebuilding the encoder's features from the codes, linearly."""
    head_start: float = 0.85
    """Share of the steps after which the head starts, on clusters of the encoder's features."""
    drop_edges: tuple[float, float] = (0.3, 0.3)
    """Share of edges dropped in each view."""
    drop_features: tuple[float, float] = (0.2, 0.2)
    """Share of feature columns dropped in each view."""
    adaptive: bool = False
    """Drop the less important edges and features more often, as GCA does."""
    half_hop: float = 0.0
    """Share of nodes whose messages arrive one step later in a view, as in Half-Hop."""
    neighbors: tuple[int, ...] | None = None
    """Encode sampled neighbourhoods, this many neighbours per hop."""
    batch_size: int | None = None  # type: ignore[assignment]
    """Nodes per step and process."""
    steps: int | None = None
    """Number of steps."""
    epochs: int | None = None  # type: ignore[assignment]
    """Passes over the nodes, instead of `steps`."""
    lr: float | None = None  # type: ignore[assignment]
    """Highest learning rate."""
    weight_decay: float = 0.0
    """Pull of the weights towards zero."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises."""
    schedule: Literal["cosine", "constant"] = "constant"
    """What the learning rate does after the warm-up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.head_start < 1:
            raise ValueError(
                f"head_start must lie in [0, 1), a share of the steps; got {self.head_start}"
            )

    def for_graph(self, nodes: int, edges: int) -> "GraphConfig":
        """The config with settings that are None set by the rule; a batch of None is all nodes."""
        settings = rule(nodes, edges)
        sampled = self.neighbors is not None or settings.neighbors is not None
        steps, epochs = self.steps, self.epochs
        if steps is None and epochs is None:
            steps, epochs = (None, 1) if sampled else (settings.steps, None)
        return replace(
            self,
            neighbors=self.neighbors or settings.neighbors,
            batch_size=self.batch_size or (min(_SAMPLED, nodes) if sampled else None),
            steps=steps,
            epochs=epochs or 1,
            lr=self.lr or settings.lr,
        )


class Settings(NamedTuple):
    """Settings derived from the size of a graph."""

    width: int
    dims: int
    k: int
    steps: int
    lr: float
    neighbors: tuple[int, ...] | None


_SAMPLED = 2048
"""Nodes of a step where neighbourhoods are sampled."""


def rule(nodes: int, edges: int) -> Settings:
    """One rule for any graph.

    - `width` 256.
    - `dims` 2.5 times the square root of the nodes, rounded down to a power of two, 8 to 512: a
      larger graph has more communities, and each has more nodes.
    - `k`, the average active entries of a node, a twentieth of `dims`, at least two.
    - Up to 35,000 nodes and four million edges a step encodes the whole graph with all nodes as
      negatives; beyond, 2,048 nodes with 10 neighbours and 5 of each of those, for one epoch.
    - 100 steps at a `lr` of .001. Above 5,000 nodes, where the gradient is a mean over more of
      them, 60 steps at .002.

    Example:
        >>> rule(nodes=2708, edges=10556).dims
        128
        >>> rule(nodes=1_000_000, edges=10_000_000).neighbors
        (10, 5)
    """
    dims = 1 << max(3, min(9, isqrt(25 * nodes // 4).bit_length() - 1))
    large = nodes > 5_000
    return Settings(
        width=256,
        dims=dims,
        k=active(dims),
        steps=60 if large else 100,
        lr=2e-3 if large else 1e-3,
        neighbors=None if fits_whole(nodes, edges) else (10, 5),
    )


def fits_whole(nodes: int, edges: int) -> bool:
    """Whether a graph is small enough to encode all of its nodes in one step."""
    return nodes <= WHOLE and edges <= _WHOLE_EDGES


def active(dims: int) -> int:
    """Active entries of a node: a twentieth of the dimensions, at least two."""
    return min(dims, max(2, dims // 20))
