"""What a graph run leaves behind: features, figures, a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from ncl_multi.adapters.graph.model import NonNegGraph
from ncl_multi.codes.features import Features
from ncl_multi.metrics import readability, readable_features
from ncl_multi.metrics.nodes import (
    agreement,
    k_means,
    node_accuracy,
    random_split,
    strongest_dimension,
)
from ncl_multi.report import table, write_json

SHOWN = (
    "encoder_accuracy",
    "head_accuracy",
    "sparsity",
    "alive",
    "class_consistency",
    "purity_at_10",
    "cluster_purity",
    "intruder_labels",
    "distinct",
    "names_once",
    "name_fit",
    "nmi",
    "ari",
)


def write_report(
    models: Mapping[str, NonNegGraph],
    data: Any,
    items: Sequence[str],
    classes: Sequence[str] | None,
    out: Path,
    *,
    data_name: str,
    seed: int,
) -> dict[str, Any]:
    """Measure every model, print the table, and write features and figures to `out`.

    What belongs to a model other than `ncl` is written to a folder of its name.
    """
    figures = {}
    for name, model in models.items():
        folder = out if name == "ncl" else out / name
        h, z = normalize(model.embed(data), dim=1), model.encode(data, dense=True)
        about = {
            "model": model.name, "data": data_name, "split": "all", "seed": seed,
            "activation": model.head.activation, "normalised": True, "classes": classes,
        }  # fmt: skip
        for output, codes in (("encoder", h), ("head", z)):
            features = Features(codes, data.y, list(items), about | {"output": output})
            features.save(folder / "features" / f"all_{output}.safetensors")
        row = measure(data, h, z, signed=model.head.activation == "none", seed=seed)
        row |= readable_features(features).figures
        figures[name] = {"all": row}
        model.figures = {measure: round(value, 4) for measure, value in row.items()}
        model.save_pretrained(folder / "model")
    if data.y is None:
        print("the graph has no labels: accuracy, class consistency and agreement are left out")
    write_json(out / "metrics.json", figures)
    shown = {
        name: {m: own["all"][m] for m in SHOWN if m in own["all"]} for name, own in figures.items()
    }
    table(f"{data_name}, seed {seed}", shown)
    return figures


def measure(data: Any, h: Tensor, z: Any, *, signed: bool, seed: int) -> dict[str, float]:
    """Accuracy of encoder and head on random and public splits; what the head's codes are like."""
    y = data.y
    if y is None or not (y >= 0).any():
        return readability(z)
    split = random_split(y, seed)
    row = {
        "encoder_accuracy": node_accuracy(h, y, *split),
        "head_accuracy": node_accuracy(z, y, *split),
    }
    if "train_mask" in data and "test_mask" in data:
        public = data.train_mask.nonzero()[:, 0], data.test_mask.nonzero()[:, 0]
        row["encoder_accuracy_public_split"] = node_accuracy(h, y, *public)
        row["head_accuracy_public_split"] = node_accuracy(z, y, *public)
    row |= readability(z[y >= 0], y[y >= 0])
    clusters = k_means(z, len(y[y >= 0].unique()), seed) if signed else strongest_dimension(z)
    return row | agreement(clusters, y)
