"""The garbage collector runs rarely while a command or a search works, and as before when it has ended,
however it did."""

import gc

import pytest

from shardcore.core.gc_pause import infrequent_gc
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS


def test_collections_are_rare_within_and_as_before_afterwards():
    before = gc.get_threshold()
    with pytest.raises(ValueError), infrequent_gc():
        assert gc.get_threshold()[0] > 100 * before[0]
        raise ValueError
    assert gc.get_threshold() == before


def test_every_search_asks_for_it():
    found, before = [], gc.get_threshold()

    class Asked(Exception):
        pass

    class Asking(Problem):
        """A problem that a search asks for its setting."""

        def require_setting(self, *asked):
            found.append(gc.get_threshold())
            raise Asked

    problem = Asking("p", (Table("t", 10, 8, 1.0),), Topology((Device(1 << 30),)), 4)
    for sharder in SHARDERS.values():
        with pytest.raises(Asked):
            sharder(problem, AnalyticModel(Setting("gpu", 4)))
    assert len(found) == len(SHARDERS) and all(threshold[0] > 100 * before[0] for threshold in found)
    assert gc.get_threshold() == before
