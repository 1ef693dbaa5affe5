"""SHARDERS: every search by its name, with one signature."""

from __future__ import annotations

from typing import Protocol

from shardcore import renamed
from shardcore.collector import rare_collections
from shardcore.cost.model import CostModel
from shardcore.errors import ShardCoreError
from shardcore.search import greedy, neuroshard, torchrec
from shardcore.search.anneal import sharder as annealing
from shardcore.search.budget import Budget
from shardcore.types import Plan, Problem


class Sharder(Protocol):
    """The signature of every sharder (see shardcore/search/__init__.py)."""

    def __call__(self, problem: Problem, model: CostModel, *, seed: int = 0,
                 budget: Budget | None = None) -> Plan: ...


DEFAULT_SHARDER = "anneal_columns"
BASELINES = ("random", *greedy.ORDERS)
"""Sharders without a search. Published plans are shown against these."""

_all = {"random": greedy.random, **greedy.ORDERS, "neuroshard": neuroshard.neuroshard,
        "anneal": annealing.anneal, "anneal_columns": annealing.anneal_columns}
if torchrec.installed():
    _all["torchrec"] = torchrec.torchrec
SHARDERS: dict[str, Sharder] = {name: rare_collections()(sharder) for name, sharder in _all.items()}

_GONE = {"embark": "EMBark's planner is", "milp": "the integer program is"}


def known(name: str) -> str:
    """The name of a sharder in SHARDERS, also for an older name. Raises ShardCoreError if unknown."""
    found = renamed.sharder(name)
    if found in SHARDERS:
        return found
    if name in _GONE:
        raise ShardCoreError(f"algorithm {name!r} is not known any more: {_GONE[name]} for comparisons only, "
                             f"in bench/peers (python -m bench.search); use {DEFAULT_SHARDER}")
    raise ShardCoreError(f"algorithm {name!r} is not known; there are {', '.join(SHARDERS)}")
