"""Statistics of few, unequal and dependent samples: clustered intervals, sign-flip tests, granulated rank
correlation.
"""

from sharpscope.analysis.statistics.concentration import gini, lorenz, top_share
from sharpscope.analysis.statistics.intervals import (
    BCA_FROM,
    PERCENTILE_T_FROM,
    Interval,
    accuracy_interval,
    contrast_interval,
    mean_interval,
    share_interval,
)
from sharpscope.analysis.statistics.permutation import (
    EXACT_UP_TO,
    holm,
    sign_flip_interval,
    sign_flip_p,
    smallest_sign_flip_p,
)
from sharpscope.analysis.statistics.ranks import Granulated, granulated_kendall, kendall, weighted_ranks
from sharpscope.analysis.statistics.regression import ClusterSlope, cluster_moments

__all__ = [
    "BCA_FROM",
    "EXACT_UP_TO",
    "PERCENTILE_T_FROM",
    "ClusterSlope",
    "Granulated",
    "Interval",
    "accuracy_interval",
    "cluster_moments",
    "contrast_interval",
    "gini",
    "granulated_kendall",
    "holm",
    "kendall",
    "lorenz",
    "mean_interval",
    "share_interval",
    "sign_flip_interval",
    "sign_flip_p",
    "smallest_sign_flip_p",
    "top_share",
    "weighted_ranks",
]
