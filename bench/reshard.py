"""Moves of running jobs' tables, on gloo ranks of this machine: exact, priced, in time, and by dying ranks.

    python -m bench.reshard pairs --out pairs.jsonl        drawn pairs of plans of all kinds, small tables
    python -m bench.reshard large --out large.jsonl        pauses of larger tables, and rates that predict them
    python -m bench.reshard memory --out memory.jsonl      peak memory of the same moves
    python -m bench.reshard kills --out kills.jsonl        a rank dies at a random instant of a move
    python -m bench.reshard kills-8 --out kills-8.jsonl    the same on 8 ranks
    python -m bench.reshard torchrec --out torchrec.jsonl  DMP.reshard on the same pairs
    python -m bench.reshard drift --out drift.jsonl        a job whose heat moves, with a rank at half speed
    python -m bench.reshard torchrec-whole --out w.jsonl   and on pairs of plans of whole tables
    python -m bench.reshard report --out pairs.jsonl       what a file has, as a table

Each goes on where it was ended: a line of the file is a case that is done.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import common, reshard_drift
from bench import reshard_jobs as jobs
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.cost.move_rates import MoveRates
from shardcore.plans.move_price import price_move
from shardcore.torchrec import reshard as moving
from shardcore.torchrec.agreement import Agreement
from shardcore.torchrec.move_rates import MoveRatesConfig, measure_move_rates
from shardcore.torchrec.plan_files import to_json
from shardcore.torchrec.reshard import MoveConfig, Moved, reshard
from shardcore.torchrec.rows import WEIGHTS, collections_of
from shardcore.torchrec.transfer import Exchange

sys.path.append(str(Path(__file__).parents[1] / "tests" / "torchrec"))

import training

WORLDS = ((1, 2), (2, 2), (2, 4), (4, 2))
"""Emulated hosts, and ranks of each."""
STEPS, BEFORE = 20, 5
"""Steps after a move, and before it."""
PAIRS = 19
"""Pairs of plans for each world; optimizers take turns."""
DRIFTS = 6
TIMED, EVENTS = (100, 25), 60
"""Kills at random instants, of 2 or 4 ranks and of 8, and events among which the others die."""
MOST_S = 0.8
"""Seconds from the call of a move to the death of one of 2 ranks, at most."""
LARGE = 8000
"""Rows of large tables over those of small ones."""
LARGE_OPTIMIZER, LARGE_MOVE = "EXACT_ADAGRAD", MoveConfig(piece_mib=8, timeout_s=100)


# --- cases --------------------------------------------------------------------------------------------------


def moved_pair(rank: int, given: Problem, folder: str, seed: int, optimizer: str) -> dict[str, Any]:
    """A job that moves after BEFORE steps, compared after STEPS more with one that never did."""
    before, after = jobs.pair(given, optimizer, np.random.default_rng([7, seed]))
    settings = jobs.Settings(optimizer, seed=seed)
    job, still = (jobs.Job.of(given, before, settings) for _ in range(2))
    for step in range(BEFORE + STEPS):
        if step == BEFORE:
            made = reshard(
                job.model,
                job.exported(after),
                job.optimizer,
                config=MoveConfig(piece_mib=2**-8, timeout_s=60),
            )
        job.train(step)
        still.train(step)
    return {
        "apart": jobs.apart(job.whole(), still.whole()),
        "kinds": _kinds(before) + _kinds(after),
        "tables": len(made.tables),
        "bytes": dict(made.bytes),
        "seconds": dict(made.seconds),
    }


def _kinds(plan: Any) -> list[str]:
    of_tables = {}
    for p in plan.placements:
        cut = p.kind == "column" and p.shard.width < p.shard.table.dim
        of_tables[p.shard.table.name] = "columns" if cut else "whole" if p.kind == "column" else p.kind
    return sorted(of_tables.values())


def moved_large(
    rank: int, given: Problem, folder: str, seed: int, config: MoveConfig
) -> list[dict[str, Any]]:
    """Pause, peak memory and the first step after it, of moves there and back."""
    before, after = large_pair(given, seed)
    job = jobs.Job.of(given, before, jobs.Settings(LARGE_OPTIMIZER, LARGE))
    job.train(0)
    found = []
    for plan in (after, before):
        new = job.exported(plan)
        rss = _reset_peak()
        made = reshard(job.model, new, job.optimizer, config=config)
        peak = _peak() - rss
        steps_s = [_seconds(lambda step=step: job.train(step)) for step in (1, 2)]
        found.append(
            {
                "bytes": dict(made.bytes),
                "seconds": dict(made.seconds),
                "stated": made.extra_bytes[rank],
                "measured": peak,
                "steps_s": steps_s,
                "gradients": _gradients(job, made),
            }
        )
    return found


def _gradients(job: jobs.Job, made: Moved) -> int:
    """Bytes of gradients of replicas in collections that moved."""
    moved = {path for path in collections_of(job.model) if any(t.startswith(f"{path}.") for t in made.tables)}
    return sum(
        part.tensors[WEIGHTS].nbytes
        for part in job.parts()
        if part.key[0] in moved
        and job.model.plan.plan[part.key[0]][part.key[1]].sharding_type == "data_parallel"
    )


def large_pair(given: Problem, seed: int) -> tuple[Plan, Plan]:
    return jobs.pair(given, LARGE_OPTIMIZER, np.random.default_rng([7, seed]))


def measured_rates(rank: int, given: Problem, folder: str) -> dict[str, Any]:
    """This machine's rates of moves, by tables made for it."""
    config = MoveRatesConfig(move=LARGE_MOVE)
    return asdict(measure_move_rates(torch.device("cpu"), len(given.topology.on_hosts[0]), config))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _reset_peak() -> int:
    """Bytes of memory that this process has. Its peak counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def killed(
    rank: int, given: Problem, folder: str, seed: int, death: tuple[int, float, int]
) -> dict[str, Any]:
    """A rank dies at an instant of a move. Plan and rows of this one afterwards.

    death: the rank; seconds until it dies; the event at which it dies instead, or 0. Events are pieces, votes,
      decisions and swaps, counted from the first piece.
    """
    victim, after_s, event = death
    before, after = jobs.pair(given, "EXACT_ADAGRAD", np.random.default_rng([7, seed]))
    job = jobs.Job.of(given, before, jobs.Settings("EXACT_ADAGRAD", seed=seed))
    job.train(0)
    plans = {"old": job.exported(before), "new": job.exported(after)}
    whole = job.whole()
    dist.barrier()
    if rank == victim and event:
        _die_at(event)
    elif rank == victim:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    start, error = time.monotonic(), ""
    try:
        # 8 ranks share two cores here.
        config = MoveConfig(piece_mib=2**-11, timeout_s=1.5 if len(given.topology) < 8 else 6)
        reshard(job.model, plans["new"], job.optimizer, config=config)
    except ShardCoreError as e:
        error = str(e)
    now = to_json(job.model.plan)
    plan = next((name for name, p in plans.items() if to_json(p) == now), "a mixture")
    return {
        "plan": plan if job.has_rows_of(whole) else f"{plan}, other rows",
        "error": error,
        "seconds": time.monotonic() - start,
    }


def _die_at(event: int) -> None:
    """Let this process die at the n-th piece read or written, vote after them, decision or swap."""
    count = [0]

    def dying(call: Callable[..., Any], counts_from: int) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if count[0] >= counts_from:
                count[0] += 1
            if count[0] == event:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for owner, name, counts_from in (
        (Exchange, "_read", 0),
        (Exchange, "_write", 0),
        (Agreement, "_exchange", 1),  # votes before the first piece are not counted
        (Agreement, "_decide", 1),
        (moving._Collection, "swap", 1),
    ):
        setattr(owner, name, dying(getattr(owner, name), counts_from))


def torchrec_pair(
    rank: int, given: Problem, folder: str, seed: int, optimizer: str, whole: bool
) -> dict[str, Any]:
    """DMP.reshard of the same pair: of each EmbeddingBagCollection its changed tables.

    whole: True for plans of whole tables in place of the pair's.
    """
    rng = np.random.default_rng([7, seed])
    before, after = (
        (jobs.whole_tables(given, rng) for _ in range(2)) if whole else jobs.pair(given, optimizer, rng)
    )
    settings = jobs.Settings(optimizer, seed=seed)
    job, still = (jobs.Job.of(given, before, settings) for _ in range(2))
    new = job.exported(after)
    for step in range(BEFORE):
        job.train(step)
        still.train(step)
    for path in jobs.BAGS:
        old = dict(job.model.plan.plan[path])
        delta = {name: s for name, s in new.plan[path].items() if s != old[name]}
        if delta:
            job.model.reshard({path: (0.0, delta)}, path)
    for step in range(BEFORE, BEFORE + STEPS):
        job.train(step)
        still.train(step)
    parts = {(p.key, p.rows, p.columns) for p in job.parts() if p.key[0] in jobs.BAGS}
    planned = {
        (p.key, p.rows, p.columns)
        for p in jobs.Job.of(given, after, settings).parts()
        if p.key[0] in jobs.BAGS
    }
    return {"apart": jobs.apart(job.whole(), still.whole()), "applied": parts == planned}


# --- runs ---------------------------------------------------------------------------------------------------


def cases(arm: str, kills: int) -> Iterator[tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]]:
    """The key of each case of an arm, with its work and arguments."""
    if arm in ("kills", "kills-8"):
        on_eight = arm == "kills-8"
        for i in range(kills):
            rng = random.Random(i + 1000 * on_eight)
            world = WORLDS[2 * on_eight + i % 2]
            victim = rng.randrange(world[0] * world[1])
            after_s = rng.uniform(0, MOST_S * (4 if on_eight else 1))
            # The first at a random instant, the others at a random event of the last phases.
            event = 0 if i < TIMED[on_eight] else rng.randrange(1, EVENTS)
            key = {"arm": arm, "world": world, "case": i, "after_s": after_s, "event": event}
            yield key, killed, (i, (victim, after_s, event))
        return
    if arm == "drift":
        for seed in range(DRIFTS):
            yield {"arm": arm, "world": WORLDS[0], "case": seed}, reshard_drift.drift, (seed,)
        return
    for world in WORLDS if arm == "pairs" else WORLDS[:2]:
        if arm == "large":
            yield {"arm": "rates", "world": world, "case": 0}, measured_rates, ()
        for seed in range({"large": 8, "memory": 8, "torchrec-whole": 6}.get(arm, PAIRS)):
            optimizer = jobs.OPTIMIZERS[seed % len(jobs.OPTIMIZERS)]
            if arm == "pairs" and seed >= PAIRS - 2:
                optimizer = jobs.REPLICAS_ADAM
            if arm in ("large", "memory"):
                # As in a job, pieces are small beside the shards that move.
                config = LARGE_MOVE if arm == "large" else replace(LARGE_MOVE, piece_mib=1)
                yield {"arm": arm, "world": world, "case": seed}, moved_large, (seed, config)
            else:
                key = {"arm": arm, "world": world, "case": seed, "optimizer": optimizer}
                if arm == "pairs":
                    yield key, moved_pair, (seed, optimizer)
                else:
                    yield key, torchrec_pair, (seed, optimizer, arm == "torchrec-whole")


def run(arm: str, path: Path, kills: int) -> None:
    if arm == "memory":
        # Freed memory goes back to the system at once, so that a process's peak is that of what it uses.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows = common.lines_of(path)
    done = {(x["arm"], *x["world"], x["case"]) for x in rows}
    for key, work, args in cases(arm, kills):
        if (arm, *key["world"], key["case"]) in done:
            continue
        start = time.monotonic()
        hosts, per_host = key["world"]
        given = jobs.problem(hosts, per_host, LARGE if arm in ("large", "memory") else 1)
        found = training.on_ranks(
            given, work, *args, limit_s=60 if "torchrec" in arm else 600 if arm == "drift" else 180
        )
        found = [{"error": f[:300]} if isinstance(f, str) else f for f in found]
        rows.append({**key, "found": found, "wall_s": time.monotonic() - start})
        common.write_lines(path, rows)
        common.say(json.dumps(key), str(found)[:300])


def report(rows: list[dict[str, Any]]) -> str:
    """All that was found, as Markdown."""
    lines = ["| arm | hosts x ranks | cases | result |", "|---|---|---|---|"]
    for arm, world in dict.fromkeys((x["arm"], tuple(x["world"])) for x in rows if x["arm"] != "rates"):
        of_world = [x for x in rows if tuple(x["world"]) == world]
        of_arm = [x for x in of_world if x["arm"] == arm]
        # Rates are for the moves of the same ranks.
        result = _RESULTS[arm.split("-")[0]](of_world if arm == "large" else of_arm)
        lines.append(f"| {arm} | {world[0]} x {world[1]} | {len(of_arm)} | {result} |")
    return "\n".join(lines)


def _of_pairs(rows: list[dict[str, Any]]) -> str:
    found = [f for x in rows for f in x["found"]]
    worst = max((f["apart"] for f in found if f and "apart" in f), default=float("nan"))
    failed = sum(not f or "apart" not in f for f in found)
    return f"largest difference {worst:.1e}; {failed} of {len(found)} ranks failed"


def _of_kills(rows: list[dict[str, Any]]) -> str:
    ends = Counter(" and ".join(sorted({f.get("plan", "error") for f in x["found"] if f})) for x in rows)
    alive = sum(sum(f is not None for f in x["found"]) < len(x["found"]) - 1 for x in rows)
    longest = max(f["seconds"] for x in rows for f in x["found"] if f and "seconds" in f)
    said = ", ".join(f"{n} {plan or 'nobody'}" for plan, n in ends.most_common())
    return f"plan of all other ranks: {said}; {alive} with a rank that hung; longest {longest:.0f} s"


def _of_torchrec(rows: list[dict[str, Any]]) -> str:
    ends: Counter[str] = Counter()
    for x in rows:
        found = x["found"]
        if any(f is None for f in found):
            ends["hangs"] += 1
        elif any("error" in f for f in found):
            ends[next(f["error"].split(":")[0] for f in found if "error" in f)] += 1
        elif not all(f["applied"] for f in found):
            ends["not applied"] += 1
        else:
            ends["exact" if max(f["apart"] for f in found) < 1e-6 else "other rows or state"] += 1
    return ", ".join(f"{n} {end}" for end, n in ends.most_common())


def _moves(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int, list[dict[str, Any]]]]:
    """Each move: its case, 0 for there and 1 for back, and what each rank found."""
    whole = [x for x in rows if all(isinstance(f, list) for f in x["found"])]
    return [(x, i, [f[i] for f in x["found"]]) for x in whole for i in (0, 1)]


def _of_large(rows: list[dict[str, Any]]) -> str:
    """Pauses beside those that the machine's rates predict from the two plans alone."""
    rates = next((x["found"][0] for x in rows if x["arm"] == "rates"), None)
    moves = _moves([x for x in rows if x["arm"] == "large"])
    if rates is None or not moves:
        return "no rates, or no moves"
    made = MoveRates(**rates)
    ratios, of_links, pauses, gb, first_s = [], [], [], [], []
    for case, back, of_ranks in moves:
        hosts, per_host = case["world"]
        given = replace(jobs.problem(hosts, per_host, LARGE), optimizer="exact_adagrad")
        before, after = large_pair(given, case["case"])
        old, new = (after, before) if back else (before, after)
        price = price_move(old, new, given, rates=made)
        pause_s = max(sum(f["seconds"].values()) for f in of_ranks)
        ratios.append(price.pause_s / pause_s)
        of_links.append(pause_s / max(price.seconds.values()))
        pauses.append(pause_s)
        gb.append(sum(of_ranks[0]["bytes"].values()) / 1e9)
        first_s.append(max(f["steps_s"][0] - f["steps_s"][1] for f in of_ranks))
    errors = np.abs(np.array(ratios) - 1)
    return (
        f"{len(moves)} pauses of {min(pauses):.2f} to {max(pauses):.2f} s for {min(gb):.2f} to {max(gb):.2f} GB, "
        f"predicted with a median error of {np.median(errors):.0%}, {np.mean(errors <= 0.15):.0%} within 15%, at "
        f"most {errors.max():.0%}; {np.median(of_links):.1f} times their bytes' time on links; the first step after "
        f"takes {np.median(first_s):.2f} s more than the second"
    )


def _of_memory(rows: list[dict[str, Any]]) -> str:
    found = [f for *_, of_ranks in _moves(rows) for f in of_ranks]
    words = []
    # On a CPU nothing touches gradients before the next step.
    for name, ratios in (
        ("as stated", np.array([f["measured"] / f["stated"] for f in found])),
        (
            "as stated without gradients of replicas",
            np.array([f["measured"] / (f["stated"] - f["gradients"]) for f in found]),
        ),
    ):
        words.append(
            f"{ratios.min():.2f} to {ratios.max():.2f} times {name}, median {np.median(ratios):.2f}, "
            f"{np.mean(np.abs(ratios - 1) <= 0.1):.0%} within 10%"
        )
    return f"peak memory of ranks {'; '.join(words)}"


_RESULTS = {
    "pairs": _of_pairs,
    "kills": _of_kills,
    "torchrec": _of_torchrec,
    "large": _of_large,
    "memory": _of_memory,
    "drift": reshard_drift.result,
}


def main() -> None:
    parser = common.parser(
        __doc__,
        {"arm": "pairs, large, memory, kills, kills-8, drift, torchrec, torchrec-whole or report"},
        out=(..., "a line of JSON for each case"),
        kills=(150, "ranks to kill"),
    )
    args = parser.parse_args()
    if args.arm == "report":
        print(report(common.lines_of(args.out)))
    else:
        run(args.arm, args.out, args.kills)


if __name__ == "__main__":
    main()
