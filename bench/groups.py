"""Which sharding groups would be chosen for MLPerf's DLRM-DCNv2 on 32 devices, under given rates.

  python -m bench.groups --sync-every 500

Four hosts of eight devices of 80 GB, 150 GB/s within hosts and 25 between. Rates are those of AnalyticModel.
Nothing is measured.
"""

from __future__ import annotations

import argparse

from shardcore.core.constraints import Constraints
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.report import decisions_report
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.groups import Groups
from shardcore.tables.public import public_pool

GB = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sync-every", type=int, default=500, help="steps between synchronisations (500)")
    parser.add_argument("--budget-evals", type=int, default=20_000, help="of each search (20000)")
    args = parser.parse_args()
    devices = tuple(Device(80 * GB, host=f"host-{h}") for h in range(4) for _ in range(8))
    links = Topology(devices, links=links_of(within_host=150.0, between_hosts=25.0, latency_ms=0.05))
    problem = Problem(
        "dcnv2",
        public_pool("mlperf-dlrm-dcnv2"),
        links,
        65536,
        "rowwise_adagrad",
        Constraints(reserved_bytes=12 * GB),
    )
    model = AnalyticModel(Setting("given", problem.global_batch, optimizer=problem.optimizer))
    best = decide(
        problem,
        model,
        [Groups(sync_every=args.sync_every)],
        SHARDERS["anneal_columns"],
        budget=Budget(evals=args.budget_evals),
    )
    print(decisions_report.ledger_text(best.ledger))


if __name__ == "__main__":
    main()
