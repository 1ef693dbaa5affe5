"""A job's folder as ShardCoreProfiler leaves it, made by hand."""

import numpy as np
from kineto_traces import gloo_step, write
from laws import SETTING
from shapes import column

from shardcore.core.access_statistics import Zipf
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.io import job_folder
from shardcore.io.measurements import TimingSpread

TABLES = tuple(Table(f"t{i}", 4_000, 16, 5.0, Zipf(1.0)) for i in range(6))
PROBLEM = Problem("job", TABLES, Topology((Device(1 << 30),) * 2), SETTING.batch)
UNEVEN = Plan(tuple(column(t, int(i > 4)) for i, t in enumerate(TABLES)))
FEATURES = {t.name: (f"f-{t.name}",) for t in TABLES}


def lookups(rank, rng):
    """A rank's batch: 3 lookups of a sample in each feature."""
    n = PROBLEM.local_batch
    return {f"f-{t.name}": (rng.integers(0, 100, 3 * n), np.full(n, 3)) for t in TABLES}


def traced_step(folder, step=1000, ranks=(0, 1), entered=1.0):
    """entered: outputs that ranks enter into their exchange, over those of the plan."""
    where = job_folder.step_folder(folder, step)
    where.mkdir(parents=True)
    job_folder.write_facts(where, job_folder.JobFacts(2, FEATURES, {"torch": "2.13.0"}), PROBLEM, UNEVEN)
    for rank in ranks:
        job_folder.write_rank_measurements(
            where, rank, TimingSpread(18.0, 17.0, 19.0, 900), lookups(rank, np.random.default_rng(rank))
        )
        columns = sum(p.shard.table.dim for p in UNEVEN.placements if p.devices == (rank,))
        outputs = round(entered * PROBLEM.global_batch * columns)
        write(where, rank, gloo_step(late_ms=3.0 * rank, entered=outputs))
    return where
