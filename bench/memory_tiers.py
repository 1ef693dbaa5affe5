"""Plans for tables that do not fit in device memory: ours against simpler load factors and TorchRec's.

    python -m bench.memory_tiers --model MODEL --problems 12

Problems: 60 tables of the calibrated pool on 4 devices, with memory for a share of the weights beside what
a step needs. Each arm gives load factors and places within the same bytes. All are priced by one model, with
one law of the link. Nothing is measured: rows in host memory need a GPU.

- ours: `tiers --model`, which searches for both.
- largest to host, one load factor: the usual, then our search for places.
- TorchRec: its planner with its scale-up proposer, from the best of some starts. Then its load factors with
  our search for places.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.peers.scaleup import STARTS, scaled_up
from shardcore.core.errors import Infeasible
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem
from shardcore.cost import composite
from shardcore.cost.model import CostModel
from shardcore.io import files
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.memory_tiers import (
    MemoryTiers,
    link_ms,
    tier_bytes,
    tiers_of,
    with_load_factors,
)
from shardcore.search.state.shards import priced
from shardcore.tables.generate import generate_pool

SHARES = (0.05, 0.15, 0.3, 0.6)
"""Of the weights, what fits in device memory."""
EVALS = 5000
Found = tuple[Problem, Plan] | None


def drawn(index: int, batch: int, gbps: float) -> Problem:
    """A problem of 60 tables."""
    pool, rng = [t for t in generate_pool() if t.pooling > 0.01], np.random.default_rng([index, 23])
    some = tuple(pool[k] for k in rng.choice(len(pool), 60, replace=False))
    rich = Problem(
        f"tiers-{index}",
        some,
        Topology((Device(1 << 40),) * 4, memory=(Memory("host", 1 << 50, gbps),)),
        batch,
    )
    beside = sum(d.memory_bytes for d in rich.topology.devices) - tier_bytes(rich)
    memory = int(beside + SHARES[index % len(SHARES)] * sum(t.bytes for t in some)) // 4
    return replace(rich, topology=replace(rich.topology, devices=(Device(memory),) * 4))


def searched(problem: Problem, model: CostModel) -> Found:
    try:
        return problem, SHARDERS["anneal_columns"](problem, model.for_problem(problem), budget=Budget(EVALS))
    except Infeasible:
        return None


def with_room(how: Callable[[Problem], Problem], problem: Problem, model: CostModel) -> Found:
    """The best plan if `how` gets all of the memory, or less, as our command does."""
    found = []
    for share in (1.0, 0.97, 0.9, 0.75, 0.5):
        less = int((1 - share) * tier_bytes(problem) / len(problem.topology))
        devices = tuple(replace(d, memory_bytes=d.memory_bytes - less) for d in problem.topology.devices)
        try:
            own = how(replace(problem, topology=replace(problem.topology, devices=devices)))
        except Infeasible:
            break
        found.append(searched(replace(own, topology=problem.topology), model))
    return _best(found)


def torchrec(problem: Problem, model: CostModel) -> tuple[Found, Found]:
    """Its best plan, and the best with its load factors and our places."""
    theirs, ours = [], []
    for start in STARTS:
        if found := scaled_up(problem, start):
            own, placements = found
            theirs.append((own, priced(placements, own, model.for_problem(own))))
            ours.append(searched(own, model))
    return _best(theirs), _best(ours)


def _best(found: list[Found]) -> Found:
    return min((x for x in found if x), key=lambda x: x[1].provenance["predicted_ms"], default=None)


def largest_to_host(problem: Problem) -> Problem:
    """The largest tables go to host memory until the others fit."""
    largest = sorted(problem.tables, key=lambda t: -t.bytes)
    return _fitting(problem, ({t.name: 0.0 for t in largest[:n]} for n in range(len(largest) + 1)))


def one_load_factor(problem: Problem) -> Problem:
    """Every table is cached, with the largest load factor of all that fits."""
    return _fitting(problem, ({t.name: float(f) for t in problem.tables} for f in np.linspace(1, 0, 1001)))


def _fitting(problem: Problem, several: Iterable[dict[str, float]]) -> Problem:
    for factors in several:
        own = with_load_factors(problem, factors)
        if sum(tier.device_bytes for tier in tiers_of(own)) <= tier_bytes(problem):
            return own
    raise Infeasible(f"problem {problem.name!r} does not fit, with all rows in host memory")


def arms(problem: Problem, model: CostModel) -> dict[str, Found]:
    best = decide(problem, model, [MemoryTiers()], SHARDERS["anneal_columns"], budget=Budget(EVALS))
    theirs, with_ours = torchrec(problem, model)
    return {
        "ours": (best.problem, best.plan),
        "largest to host": with_room(lambda p: largest_to_host(p), problem, model),
        "one load factor": with_room(lambda p: one_load_factor(p), problem, model),
        "TorchRec scale-up": theirs,
        "its load factors, our places": with_ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--link-gbps", type=float, default=25.0, help="given (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="keep each problem's figures there, and resume")
    args = parser.parse_args()
    model = composite.load([args.model])
    done = (
        {x["problem"]: x for x in map(json.loads, args.out.read_text().splitlines())}
        if args.out and args.out.exists()
        else {}
    )
    for index in range(args.problems):
        problem = drawn(index, model.setting.batch, args.link_gbps)
        if problem.name not in done:
            began = time.monotonic()
            found = {
                name: x and {"ms": x[1].provenance["predicted_ms"], "link_ms": link_ms(x[0])}
                for name, x in arms(problem, model).items()
            }
            done[problem.name] = {
                "problem": problem.name,
                "share": SHARES[index % len(SHARES)],
                "arms": found,
            }
            print(f"{problem.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if args.out:
                files.write_atomic(args.out, "".join(json.dumps(x) + "\n" for x in done.values()).encode())
    names = list(next(iter(done.values()))["arms"])
    print(f"| memory, share of weights | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for one in done.values():
        cells = ((x and f"{x['ms']:.2f} ({x['link_ms']:.3f})") or "no plan" for x in one["arms"].values())
        print(f"| {one['share']:.0%} | {' | '.join(cells)} |")
    for name in names[1:]:
        ratios = [x["arms"][name]["ms"] / x["arms"]["ours"]["ms"] for x in done.values() if x["arms"][name]]
        print(
            f"\n{name}, over ours: median {np.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}, "
            f"{len(ratios)} of {len(done)} problems"
        )


if __name__ == "__main__":
    sys.exit(main())
