"""A model trained on known laws."""

import pytest
from laws import SETTING, cache_law, comm_samples, compute_samples

from shardcore.cost import fit


@pytest.fixture(scope="session")
def model():
    """Trained on the cache law and the exchange law."""
    comm = [*comm_samples(), *comm_samples(collective="all_to_all_ids")]
    return fit.train(compute_samples(cache_law), comm, SETTING, fit.FitConfig(epochs=30)).model
