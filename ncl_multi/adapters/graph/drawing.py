"""A drawing of a dimension: its strongest nodes, and the edges among them."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor

from ncl_multi.metrics.codes import Codes, strongest_rows, unit_rows

MOST = 4096
"""Most dimensions to draw: drawings are stored with the features."""
_STEPS = 80
_GAP = 0.5
"""Preferred distance of linked nodes; the drawing is 2 wide."""
_CIRCLE = 0.3
"""Distance at which the circles of two nodes do not touch."""


def drawings(
    z: Codes, edge_index: Tensor, y: Tensor | None = None, *, nodes: int = 12
) -> list[dict[str, list[Any]]]:
    """For each dimension its strongest nodes, their positions, and the links between them.

    `nodes` are row numbers, strongest first; `x` and `y` are their positions, 0 to 100; `links` are
    pairs of positions in `nodes`; `classes` are the labels `y`, -1 where there is none. A dimension
    that never fires has no nodes. If there are more than 4,096 dimensions, none is drawn.

    Example:
        >>> import torch
        >>> z, edges = torch.tensor([[1.0], [0.9], [0.8]]), torch.tensor([[0, 1], [1, 0]])
        >>> drawing = drawings(z, edges)[0]
        >>> drawing["nodes"], drawing["links"]
        ([0, 1, 2], [[0, 1]])
    """
    if z.shape[1] > MOST:
        return []
    labels = np.full(z.shape[0], -1) if y is None else y.long().cpu().numpy()
    source, target = edge_index.cpu().numpy()
    shape = (z.shape[0], z.shape[0])
    links = csr_array((np.ones(len(source), np.float32), (source, target)), shape=shape)
    drawn = []
    for strongest in strongest_rows(unit_rows(z), nodes):
        rows = strongest[strongest >= 0]
        among = links[rows][:, rows].toarray()
        ends = np.argwhere(np.triu(among + among.T, 1) > 0)
        places = np.round(50 + 50 * _spring(len(rows), ends)).astype(int)
        drawn.append(
            {
                "nodes": rows.tolist(),
                "classes": labels[rows].tolist(),
                "x": places[:, 0].tolist(),
                "y": places[:, 1].tolist(),
                "links": ends.tolist(),
            }
        )
    return drawn


def _spring(nodes: int, links: Int[np.ndarray, "links 2"]) -> Float[np.ndarray, "nodes 2"]:
    """Positions in -1..1: linked nodes attract, others repel each other (Fruchterman, Reingold)."""
    angle = 2 * np.pi * np.arange(nodes) / max(1, nodes)
    places = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    linked = np.zeros((nodes, nodes))
    linked[tuple(links.T)] = 1
    linked += linked.T
    for step in range(_STEPS):
        between = places[:, None] - places[None]
        apart = np.sqrt((between**2).sum(axis=2)) + 1e-3
        force = _GAP**2 / apart**2 - linked * apart / _GAP
        # A weak pull to the middle keeps nodes without a link in the drawing.
        moves = (between * force[..., None]).sum(axis=1) - 0.5 * places
        length = np.sqrt((moves**2).sum(axis=1, keepdims=True)) + 1e-9
        places = places + moves / length * np.minimum(length, 0.2 * (1 - step / _STEPS))
    # Linked nodes would be drawn on one spot if others have no links: fill width and height, then
    # separate nodes that still overlap.
    low, high = (side(places, axis=0, initial=0.0) for side in (np.min, np.max))
    places = (2 * places - low - high) / np.maximum(high - low, 1.0)
    for _ in range(_STEPS):
        between = places[:, None] - places[None]
        apart = np.sqrt((between**2).sum(axis=2)) + 1e-3
        push = np.clip(_CIRCLE - apart, 0, None) / apart
        places = np.clip(places + 0.3 * (between * push[..., None]).sum(axis=1), -1, 1)
    return places
