"""Output of a run: progress, metrics on disk, tables and plots.

A leaf of the package: it knows neither DGL nor torch.distributed.  The trainer fills one
:class:`~dgl_mgpu.report.epoch.EpochReport` a rank and epoch, merges those of all ranks, and
hands the result to everything here.  Plots (matplotlib) are imported by name from
``dgl_mgpu.report.plots``, so that a run that draws nothing does not wait for matplotlib.
"""

from dgl_mgpu.report.epoch import (
    ACCURACY,
    AUC,
    ROC_AUC,
    EpochReport,
    StageSeconds,
    TierTraffic,
    best_epoch,
    merge,
)
from dgl_mgpu.report.metrics import MetricsLog, read_metrics
from dgl_mgpu.report.progress import TrainProgress
from dgl_mgpu.report.tables import plan_table, summary_table

__all__ = [
    "ACCURACY",
    "AUC",
    "ROC_AUC",
    "EpochReport",
    "MetricsLog",
    "StageSeconds",
    "TierTraffic",
    "TrainProgress",
    "best_epoch",
    "merge",
    "plan_table",
    "read_metrics",
    "summary_table",
]
