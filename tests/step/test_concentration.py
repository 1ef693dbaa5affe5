"""How concentrated lookups are on the most popular rows."""

import numpy as np
import pytest

from shardcore.core.access_statistics import REUSE_BINS, Reuse, Zipf
from shardcore.core.types import Table
from shardcore.step.access import access_concentration, popularity_classes


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.2])
def test_concentration_is_the_share_of_the_most_popular_quarter(alpha):
    table = Table("t", 10_000, 8, 5.0, Zipf(alpha))
    [share] = access_concentration([table], np.array([10_000.0]))
    sizes, mass = popularity_classes(table)
    expected = np.interp(2_500, np.cumsum(sizes), np.cumsum(mass))
    assert share == pytest.approx(max(0.25, expected), rel=0.02)


def test_concentration_of_a_histogram_grows_with_its_higher_bins():
    def share(*bins):
        access = Reuse((*bins, *[0.0] * (REUSE_BINS - len(bins))), 1024)
        return access_concentration([Table("t", 10_000, 8, 5.0, access)], np.array([100.0]))[0]

    assert share(1.0) == pytest.approx(0.25)
    assert share(1.0) < share(0.5, 0.5) < share(0.9, 0.0, 0.0, 0.0, 0.1)
