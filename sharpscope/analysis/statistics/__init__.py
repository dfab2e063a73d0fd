"""Statistics of few, unequal and dependent samples: clustered intervals, sign-flip tests, slopes over clusters."""

from sharpscope.analysis.statistics.intervals import (
    FEWEST,
    Interval,
    accuracy_interval,
    contrast_interval,
    mean_interval,
    series_mean,
    to_halve,
)
from sharpscope.analysis.statistics.permutation import sign_flip_p, smallest_sign_flip_p
from sharpscope.analysis.statistics.regression import ClusterSlope, cluster_moments, weighted_ranks
