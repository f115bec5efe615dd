"""Formulas on codes and labels. Each brings rows to unit length itself; tensors or csr."""

from ncl_multi.metrics.disentanglement import (
    dci,
    mig,
    mutual_information,
    sap,
    separability,
    sepin,
)
from ncl_multi.metrics.finetune import fine_tuned_accuracy
from ncl_multi.metrics.probe import LinearProbe, knn_accuracy, linear_probe
from ncl_multi.metrics.readability import (
    active_dims,
    alive,
    class_consistency,
    class_entropy,
    correlation,
    effective_rank,
    interpretability,
    readability,
    sparsity,
)
from ncl_multi.metrics.retrieval import (
    mean_average_precision,
    median_rank,
    ndcg_at_k,
    precision_at_k,
    recall_at_k,
    retrieval,
    spearman,
)

__all__ = [
    "LinearProbe",
    "active_dims",
    "alive",
    "class_consistency",
    "class_entropy",
    "correlation",
    "dci",
    "effective_rank",
    "fine_tuned_accuracy",
    "interpretability",
    "knn_accuracy",
    "linear_probe",
    "mean_average_precision",
    "median_rank",
    "mig",
    "mutual_information",
    "ndcg_at_k",
    "precision_at_k",
    "readability",
    "recall_at_k",
    "retrieval",
    "sap",
    "separability",
    "sepin",
    "sparsity",
    "spearman",
]
