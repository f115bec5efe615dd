"""Formulas on codes and labels. Each normalises rows itself; tensors or csr."""

from ncl_multi.metrics.activity import (
    active_dims,
    activity_figures,
    alive,
    class_consistency,
    class_entropy,
    correlation,
    effective_rank,
    interpretability,
    sparsity,
)
from ncl_multi.metrics.disentanglement import dci, mig, mutual_information, sap, separability, sepin
from ncl_multi.metrics.finetune import fine_tuned_predictions
from ncl_multi.metrics.interval import Interval, mean_interval
from ncl_multi.metrics.probe import LinearProbe, knn_accuracy, linear_probe
from ncl_multi.metrics.readability import (
    NotMeasurableError,
    Readable,
    chance_purity,
    cluster_purity,
    dimension_purity,
    distinct,
    intruder,
    matched_dims,
    name_fit,
    naming,
    overlaps,
    purity,
    readable,
    readable_dims,
    readable_features,
    stability,
)
from ncl_multi.metrics.retrieval import mean_average_precision, ndcg_at_k, retrieval, spearman

__all__ = [
    "Interval", "LinearProbe", "NotMeasurableError", "Readable", "active_dims",
    "activity_figures", "alive", "chance_purity", "class_consistency", "class_entropy",
    "cluster_purity", "correlation", "dci", "dimension_purity", "distinct", "effective_rank",
    "fine_tuned_predictions", "interpretability", "intruder", "knn_accuracy", "linear_probe",
    "matched_dims", "mean_average_precision", "mean_interval", "mig", "mutual_information",
    "name_fit", "naming", "ndcg_at_k", "overlaps", "purity", "readable", "readable_dims",
    "readable_features", "retrieval", "sap", "separability", "sepin", "sparsity", "spearman",
    "stability",
]  # fmt: skip
