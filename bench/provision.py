"""How long a sweep over clusters takes, and what a shorter search of each loses.

    python -m bench.provision MODEL

200 tables of the calibrated pool; 40 offers of 1 to 16 hosts with given links. Seconds are of the processor,
without compiling. "loses" is how much dearer plans of fewer evaluations are, over those of the most.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from shardcore import report
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem
from shardcore.cost import neural
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import Outcome, decide
from shardcore.search.decisions.provision import Offer, Provision, Target
from shardcore.tables.generate import generate_pool

TABLES, OFFERS, HOSTS = 200, 40, 16
EVALS = (1_000, 5_000, 20_000)


def offers(model: str) -> list[Offer]:
    """Machines of 1 to 8 devices, slower and faster ones."""
    return [
        Offer(
            f"o{i}",
            1 << i % 4,
            96 << 30,
            1.0 + i,
            model,
            HOSTS,
            500.0 + 100 * i,
            1.0 + 0.05 * i,
            links=links_of(0.05, shared=True, within_host=50.0, between_hosts=2.0 + i),
        )
        for i in range(OFFERS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.provision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder of a model")
    args = parser.parse_args()
    model = neural.load(args.model)
    pool = [t for t in generate_pool() if t.pooling > 0]
    drawn = np.random.default_rng(0).choice(len(pool), TABLES, replace=False)
    problem = Problem(
        "pool-200", tuple(pool[i] for i in drawn), Topology((Device(96 << 30),)), model.setting.batch
    )

    def sweep(evals: int, of: slice = slice(None)) -> tuple[Outcome, ...]:
        decision = Provision(offers(args.model)[of], {args.model: model}, Target(step_ms=1e9))
        return decide(problem, model, [decision], SHARDERS["anneal_columns"], budget=Budget(evals)).outcomes

    sweep(EVALS[0], slice(1))  # compiles
    of = {}
    for evals in EVALS:
        began = time.process_time()
        found = sweep(evals)
        of[evals] = found, time.process_time() - began
        print(f"{evals} evaluations: {of[evals][1]:.0f} s", file=sys.stderr)
    best, rows = of[EVALS[-1]][0], []
    for evals, (found, seconds) in of.items():
        loses = [c.ms / b.ms - 1 for c, b in zip(found, best, strict=True) if c.found and b.found]
        rows.append(
            (
                f"{evals:,}",
                len(found),
                f"{seconds:.1f}",
                f"{seconds / len(found):.2f}",
                f"{100 * np.mean(loses):.1f}",
                f"{100 * max(loses):.1f}",
            )
        )
    print(
        report.markdown_table(
            ("evaluations a cluster", "clusters", "seconds", "a cluster", "loses, %", "at most, %"), rows
        )
    )


if __name__ == "__main__":
    main()
