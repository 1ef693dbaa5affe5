"""Problems of models whose ids lie unevenly in their tables: each device of a divided table has its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from given_ids import input_bytes
from shapes import row
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.io import files
from shardcore.step import memory
from shardcore.step.kinds import BUCKETIZED_IDS, sharding_kind_by_name, sharding_kind_for_table
from shardcore.step.lower import lower
from shardcore.torchrec.planner import plan_for, problem_for

ROWS, BATCH, POOLING = 1_000_000, 1024, 20
EIGHT = Topology((Device(1 << 33),) * 8)
FIRST = np.random.default_rng(0).integers(0, ROWS // 8, BATCH * POOLING)
META = torch.device("meta")
BAGS = EmbeddingBagCollection(
    device=META,
    tables=[EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=64, feature_names=["f"])],
)
SEQUENCE = EmbeddingCollection(
    device=META,
    tables=[EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=64, feature_names=["f"])],
)
MODEL = AnalyticModel(Setting("gpu", BATCH))


def batch_of(ids: np.ndarray) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor(ids),
        lengths=torch.full((BATCH,), len(ids) // BATCH, dtype=torch.int32),
    )


@pytest.mark.parametrize("module", [BAGS, SEQUENCE])
def test_ids_in_the_first_rows_are_work_of_the_first_device(module, tmp_path):
    problem = problem_for(module, EIGHT, BATCH, iter([batch_of(FIRST)]), name="first")
    [table] = problem.tables
    plan = Plan((row(table, EIGHT),))
    work = lower(plan, problem)
    cost = price(work, MODEL)
    assert cost.compute_ms[0] > 1.1 * cost.compute_ms[1]
    # What each device receives is what a batch of these ids sends it.
    [_, real] = input_bytes(
        plan, problem, lambda shard: np.full(8, ((FIRST >= shard.row_lo) & (FIRST < shard.row_hi)).sum() / 8)
    )
    assert work.entering_bytes(sharding_kind_for_table("row", table), BUCKETIZED_IDS) == pytest.approx(
        real, abs=8
    )
    even = replace(problem, tables=(replace(table, ordered=False, row_shares=None),))
    divided = [memory.used_bytes(Plan((row(p.tables[0], EIGHT),)), p) for p in (problem, even)]
    assert divided[0][0] > divided[1][0] > divided[0][1]
    files.write_problem(tmp_path / "p.json", problem)
    assert files.read_problem(tmp_path / "p.json") == problem


def test_a_search_does_not_take_uneven_rows_for_even():
    """Its plan costs what it says, like one with rows in the order of frequency."""
    plan, problem = plan_for(SEQUENCE, EIGHT, MODEL, batch_of(FIRST), algorithm="anneal")
    assert price(lower(plan, problem), MODEL).total_ms == pytest.approx(plan.provenance["predicted_ms"])


def test_hashed_ids_and_means_leave_tables_as_they_were():
    hashed = np.random.default_rng(0).integers(0, ROWS, BATCH * POOLING)
    for lookups in (batch_of(hashed), {"f": 20.0}):
        [table] = problem_for(BAGS, EIGHT, BATCH, lookups).tables
        assert (table.ordered, table.row_shares) == (False, None)
    one = Topology((Device(1 << 33),))
    assert problem_for(BAGS, one, BATCH, batch_of(FIRST)).tables[0].row_shares is None
    assert sharding_kind_by_name("row").divides_rows
