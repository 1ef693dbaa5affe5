"""Table 1 of NeuroShard's paper: its tasks, what counts as solved, its figures, and the file that resumes."""

from pathlib import Path

import numpy as np
import pytest

from bench import common, paper_table
from bench.paper_table import DEVICE_BYTES, OURS, SPARE_BYTES
from bench.peers.room import free_bytes
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Placement, Plan, Setting, Shard, Table
from shardcore.cost.replay_metrics import PlanReplay

SETTING = Setting("made-up", 2048)
POOL = [Table(f"t{i}", 10_000 * (i + 1), 16, i % 3, Zipf(1)) for i in range(30)]
HUGE = [Table("huge", 15_000_000, 16, 1, Zipf(1))]


def row(devices: int = 4, dim: int = 8, index: int = 0, **ms: float | None) -> dict:
    arms = {name: {"ms": one, "seconds": 1.0, "solved": one is not None} for name, one in ms.items()}
    return {"devices": devices, "max_dim": dim, "task": index, "seed": 1, "arms": arms}


@pytest.mark.parametrize("cell", [(4, 4), pytest.param((8, 64), marks=pytest.mark.long), (2, 128)])
def test_tasks_are_those_of_the_released_generator(cell):
    devices, max_dim = cell
    drawn = [paper_table.paper_task(POOL, SETTING, i, cell, 1) for i in range(30)]
    counts = [len(problem.tables) for problem in drawn]
    assert min(counts) >= 10 * devices // 4 and max(counts) < 60 * devices // 4
    dims = {t.dim for problem in drawn for t in problem.tables}
    assert dims == {d for d in (4, 8, 16, 32, 64, 128) if d <= max_dim}
    assert all(t.pooling > 0 for problem in drawn for t in problem.tables)
    assert all(min(free_bytes(problem)) == DEVICE_BYTES for problem in drawn)
    assert drawn[3] == paper_table.paper_task(POOL, SETTING, 3, cell, 1) != drawn[4]


def test_a_task_of_large_tables_leaves_some_memory_free():
    # 60 tables of 15 million rows never fit: the number of tables is drawn anew
    problem = paper_table.paper_task(HUGE, SETTING, 0, (4, 64), 1)
    assert sum(t.bytes for t in problem.tables) <= 4 * DEVICE_BYTES - SPARE_BYTES


def test_what_an_arm_did_not_find_itself_is_not_solved():
    whole, cut = Table("a", 100, 8, 1, Zipf(1)), Table("b", 100, 8, 1, Zipf(1))
    placed = Placement("column", Shard.whole(whole), (0,))
    halves = tuple(Placement("column", Shard(cut, 0, 100, 4 * d, 4 * d + 4), (d,)) for d in range(2))
    assert paper_table.is_solved("random", Plan((placed,)))
    assert not paper_table.is_solved("dim_greedy", Plan((placed, *halves)))
    assert paper_table.is_solved("neuroshard", Plan((placed, *halves)))
    assert not paper_table.is_solved("neuroshard", Plan((placed,), {"packed": True}))


def test_figures_are_of_the_tasks_that_were_solved():
    rows = [
        row(index=0, **{"random": 4.0, OURS: 2.0, "neuroshard": 3.0}),
        row(index=1, **{"random": None, OURS: 10.0, "neuroshard": 5.0}),
    ]
    random = paper_table.Cell.of_rows(rows, "random")
    assert random.mean_ms_text() == "4.00 (1 of 2)" and np.isnan(random.mean_ms)
    assert random.ratio_text().startswith("2.000")
    assert paper_table.Cell.of_rows(rows, OURS).mean_ms_text() == "6.00"
    assert paper_table.Cell.of_rows(rows[1:], "random").mean_ms_text() == "- (0 of 1)"
    assert paper_table.Cell.of_rows(rows[1:], "random").ratio_text() == "-"


def test_the_gain_is_over_the_best_baseline_that_solved_all():
    rows = [
        row(index=0, **{"random": 10.0, "torchrec": 5.0, "neuroshard": 4.0}),
        row(index=1, **{"random": 10.0, "torchrec": None, "neuroshard": 4.0}),
    ]
    assert paper_table.gain_over_baselines(rows, "neuroshard") == "+60.0%"
    assert paper_table.gain_over_baselines(rows[:1], "neuroshard") == "+20.0%"
    assert paper_table.gain_over_baselines(rows[1:], "torchrec") == "-"


def test_the_table_has_a_row_an_arm_and_a_column_a_cell():
    rows = [row(d, dim, **{"random": 4.0, OURS: 2.0}) for d in (4, 8) for dim in (4, 128)]
    said = paper_table.result_tables(rows, "Predicted")
    assert "| arm | 4 devices, 4 | 4 devices, 128 | 8 devices, 4 | 8 devices, 128 |" in said
    assert "| random | 4.00 | 4.00 | 4.00 | 4.00 |" in said and "## 8 devices: Predicted ms over" in said


def test_replays_become_rows_like_predictions():
    records = [
        PlanReplay(
            problem=problem, algorithm="random", plan="x", predicted_ms=1.0, replayed_ms=ms, noise_ms=0.1
        )
        for problem, ms in (("p", 3.0), ("q", 4.0))
    ]
    seconds = {("p", "random"): 0.5, ("p", "milp"): 0.7}
    assert paper_table.replayed_arms(records, "p", ["random", "milp"], seconds) == {
        "random": {"ms": 3.0, "seconds": 0.5, "solved": True},
        "milp": {"ms": None, "seconds": 0.7, "solved": False},
    }


def test_tasks_are_kept_and_read_again(tmp_path: Path):
    path, made_with = tmp_path / "tasks.jsonl", {"seed": 1}
    assert paper_table.read_rows_by_task(path, made_with) == {}
    rows = {(4, 8, i): row(index=i, random=2.0) for i in range(2)}
    common.write_rows(path, list(rows.values()))
    assert paper_table.read_rows_by_task(path, made_with) == rows
    with pytest.raises(ShardCoreError, match="'seed': 1.*'seed': 2.*another --out"):
        paper_table.read_rows_by_task(path, {"seed": 2})


def test_only_tasks_that_all_cells_have_count():
    cells = [(4, 8), (4, 16)]
    rows = {(*cell, i): row(*cell, i) for cell in cells for i in range(3)}
    del rows[4, 16, 1]
    assert paper_table.complete_tasks(rows, cells, 3) == [rows[4, 8, 0], rows[4, 16, 0]]
    assert paper_table.complete_tasks(rows, [(4, 8)], 2) == [rows[4, 8, 0], rows[4, 8, 1]]
    assert paper_table.complete_tasks(rows, [*cells, (8, 8)], 3) == []
