"""The losses of a checkpoint by a change of kind: in words, and by TorchRec itself."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shapes import column, on_hosts, replica, row

from shardcore.core.job import Job
from shardcore.core.types import Plan, Problem, Table
from shardcore.plans.diff import (
    ALL_LOADS,
    FROM_REPLICAS,
    NOTHING,
    OTHER_PARTS,
    TO_REPLICAS,
    checkpoint_loss_text,
    diff_plans,
)
from shardcore.plans.words import moves_summary

TWO = on_hosts("xx", 1 << 30)
TABLE = Table("t", 10, 8, 2.0)
OF = {
    "table_wise": [column(TABLE, 0)],
    "column_wise": [column(TABLE, 0, 0, 4), column(TABLE, 1, 4)],
    "row_wise": [row(TABLE, TWO)],
    "data_parallel": [replica(TABLE, TWO)],
}


def problem(optimizer: str) -> Problem:
    return Problem("changed", (TABLE,), TWO, 16, optimizer)


@pytest.mark.parametrize(
    "optimizer, before, after, loses",
    [
        ("rowwise_adagrad", "data_parallel", "row_wise", FROM_REPLICAS),
        ("rowwise_adagrad", "table_wise", "data_parallel", TO_REPLICAS),
        ("rowwise_adagrad", "table_wise", "column_wise", OTHER_PARTS),
        ("rowwise_adagrad", "column_wise", "row_wise", OTHER_PARTS),
        ("partial_rowwise_adam", "column_wise", "table_wise", OTHER_PARTS),
        ("rowwise_adagrad", "row_wise", "table_wise", ALL_LOADS),
        ("adam", "column_wise", "table_wise", ALL_LOADS),
        ("adam", "data_parallel", "table_wise", FROM_REPLICAS),
        ("exact_sgd", "data_parallel", "row_wise", NOTHING),
        ("exact_sgd", "column_wise", "row_wise", NOTHING),
        ("adam", "row_wise", "row_wise", ""),
    ],
)
def test_what_is_lost_is_said_with_the_moves(optimizer, before, after, loses):
    found = diff_plans(Plan(tuple(OF[before])), Plan(tuple(OF[after])), problem(optimizer))
    assert [m.loses for m in found.moves] == [loses] * (before != after)
    said = f"(t): a checkpoint loses {loses}"
    assert (said in moves_summary(found)) == bool(loses)
    assert found.to_json()["checkpoint_loses"] == ({"t": loses} if loses else {})


def test_the_optimizer_of_replicas_counts_too():
    kept = replace(problem("exact_sgd"), job=Job(replica_optimizer="adam"))
    found = diff_plans(Plan(tuple(OF["data_parallel"])), Plan(tuple(OF["row_wise"])), kept)
    assert found.moves[0].loses == FROM_REPLICAS


@pytest.mark.long
def test_torchrec_loads_what_is_said_to_load():
    pytest.importorskip("torchrec")
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("changed_kinds.py")),
            "sgd",
            "rowwise_adagrad",
            "adagrad",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *rows, grown = map(json.loads, done.stdout.splitlines())
    assert len(rows) == 48 and all(r["weights"] for r in rows)
    assert grown["rows"] == 12 and not grown["weights"]
    for r in rows:
        if r["optimizer"] == "adagrad":  # a number of state for each cell, as Adam
            fused = "adam"
        else:
            fused = {"sgd": "exact_sgd"}.get(r["optimizer"], r["optimizer"])
        loses = checkpoint_loss_text(OF[r["before"]], OF[r["after"]], problem(fused))
        state = {
            FROM_REPLICAS: "fails",
            OTHER_PARTS: "fails",
            TO_REPLICAS: "lost",
        }.get(loses, "loads")
        assert r["state"] == state, r
