"""What bench.models calls planned is what was measured."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bench import models
from shardcore.core.types import Setting
from shardcore.io import files

SHIPPED = Path(__file__).parents[2] / "datasets/cpu-amd-epyc"
SETTING = Setting("cpu-amd-epyc", 2048)


@pytest.mark.long
def test_planned_groups_are_those_that_the_shipped_dataset_measured():
    """The measured pool: one that is generated on another machine differs in a few tables."""
    [part], [pool] = SHIPPED.glob("compute-*.parquet"), SHIPPED.glob("pool-*.json")
    measured = set(pq.read_table(part, columns=["id"], use_threads=False)["id"].to_pylist())
    planned = models.planned_ids(files.read_pool(pool), SETTING, 60, [0], 4 << 30)
    assert len(planned) > 10 and planned <= measured
