"""The conformance suite of each sharder: that of shardcore.testing, with numbers of problems and limits of cost."""

import pytest
from policies import untrained

from bench.peers import PEERS
from shardcore.core.extras import TORCHREC
from shardcore.search import LEARNED, SHARDERS, Budget, greedy
from shardcore.search import sharder as sharder_of
from shardcore.testing import SharderConformance
from shardcore.torchrec import baseline as torchrec_peer

CHECKS = [name for name in dir(SharderConformance) if name.startswith("test_")]
SHIPPED = (
    "random",
    *greedy.ORDERS,
    "neuroshard",
    "anneal",
    "anneal_columns",
    "portfolio",
    "torchrec",
    "dreamshard",
    "dreamshard_direct_columns",
    "autoshard",
)
"""All sharders; of the learned ones each network and each way to cut."""
DRAWN = {
    **dict.fromkeys(("random", *greedy.ORDERS, "anneal_columns", "milp", "embark"), 2),
    "torchrec": 1,
    "size_greedy": 10,
    "neuroshard": 5,
    "anneal": 3,
    "portfolio": 2,
    **dict.fromkeys(LEARNED, 2),
}
"""Drawn problems of a test, 10 for others. Few for sharders that share code with another, or are slow."""
AT_MOST = {"portfolio": 1 + 1e-9, "anneal": 1 + 1e-9, "anneal_columns": 1 + 1e-9, "neuroshard": 1.10}
"""Limits of the mean cost relative to the cheapest of all plans. Other sharders have none."""


def suite(sharder: str) -> SharderConformance:
    if sharder == "torchrec" and torchrec_peer.missing_torchrec_message():
        pytest.skip(f"TorchRec is not installed: {TORCHREC}")

    class Suite(SharderConformance):
        name = sharder
        drawn = DRAWN.get(sharder, 10)
        at_most = AT_MOST.get(sharder, float("inf"))
        columns_alone = sharder == "anneal_columns"

        def search(self, problem, model, *, seed=0, budget=None):
            if sharder not in LEARNED:
                return {**SHARDERS, **PEERS}[sharder](problem, model, seed=seed, budget=budget)
            place = sharder_of(sharder, untrained(LEARNED[sharder][0]))
            # Random plans of a random policy.
            budget = budget and Budget(evals=min(budget.evals, 20))
            return place(problem, model, seed=seed, budget=budget)

    return Suite()
