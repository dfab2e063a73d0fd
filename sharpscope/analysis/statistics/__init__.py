"""Statistics of few, unequal and dependent samples: clustered intervals, sign-flip tests, granulated rank correlation."""

from sharpscope.analysis.statistics.concentration import gini, lorenz, top_share
from sharpscope.analysis.statistics.correlation import Correlation, correlation
from sharpscope.analysis.statistics.intervals import (
    FEWEST,
    Interval,
    accuracy_interval,
    band,
    contrast_interval,
    mean_interval,
    series_mean,
    share_interval,
    to_halve,
)
from sharpscope.analysis.statistics.permutation import (
    sign_flip_interval,
    sign_flip_p,
    sign_flip_tests,
    smallest_sign_flip_p,
)
from sharpscope.analysis.statistics.ranks import Granulated, granulated_kendall, kendall, weighted_ranks
from sharpscope.analysis.statistics.regression import ClusterSlope, cluster_moments

__all__ = [
    "FEWEST",
    "ClusterSlope",
    "Correlation",
    "Granulated",
    "Interval",
    "accuracy_interval",
    "band",
    "cluster_moments",
    "contrast_interval",
    "correlation",
    "gini",
    "granulated_kendall",
    "kendall",
    "lorenz",
    "mean_interval",
    "series_mean",
    "share_interval",
    "sign_flip_interval",
    "sign_flip_p",
    "sign_flip_tests",
    "smallest_sign_flip_p",
    "to_halve",
    "top_share",
    "weighted_ranks",
]
