"""What bench.models calls planned is what was measured."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bench import models
from shardcore.core.types import Setting
from shardcore.tables.generate import generate_pool

SHIPPED = Path(__file__).parents[2] / "datasets/cpu-amd-epyc"
SETTING = Setting("cpu-amd-epyc", 2048)


@pytest.mark.long
def test_planned_groups_are_mostly_those_that_the_shipped_dataset_measured():
    """A search that changed since plans some other groups.

    Some seconds: the whole pool is generated, as ids of groups depend on its tables.
    """
    [part] = SHIPPED.glob("compute-*.parquet")
    measured = set(pq.read_table(part, columns=["id"], use_threads=False)["id"].to_pylist())
    planned = models.planned_ids(generate_pool(), SETTING, 60, [0], 4 << 30)
    assert len(planned) > 10 and len(planned & measured) >= 0.75 * len(planned)
