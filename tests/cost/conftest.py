"""A model trained on known laws."""

import pytest
from laws import SETTING, cache_law, comm_samples, compute_samples

from shardcore.cost import fit


@pytest.fixture(scope="session")
def model():
    """Trained on the cache law and the exchange law."""
    return fit.train(compute_samples(cache_law), comm_samples(), SETTING, fit.FitConfig(epochs=30)).model
