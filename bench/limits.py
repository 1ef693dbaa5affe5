"""Limits: how long `shardcore plan` takes on large problems, what it takes of memory, and how it keeps a
budget in seconds.

    python -m bench.limits MODEL
    python -m bench.limits MODEL --sizes 100000x64 --algorithms local --budgets 30 --explain

MODEL is a folder as `python -m shardcore train` writes it. Problems are those of bench.sizes (every table's
statistics its own with --zipf: power laws, which are slower to read). Each row is a process of its own: the
whole command from its start to its end, the seconds of its parts, and its peak memory. `over` is what the
search, first plan to final check, took beyond its budget, of which 20% and 2 s are allowed. Then the same
problems with a little too little memory, far too little, just enough to the byte, and with a table that fits
no device but must stay whole: the seconds until that is said.

With --processor all seconds, also those of budgets, are the processor's (the search runs in one thread): what
a busy machine would take were it idle. `all s` is the clock's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardcore import files, report
from shardcore.access_statistics import Zipf
from shardcore.constraints import Constraints
from shardcore.cost.neural import NeuralModel, load
from shardcore.types import Problem

SIZES = ((856, 128), (10_000, 1024), (100_000, 8), (100_000, 64))
ALLOWED = (0.2, 2.0)
"""What a search may take more than its budget: a share of it, and seconds."""
PARTS = {
    "read": [("shardcore.files", "read_problem")],
    "fit": [("shardcore.search.anneal.sharder", "feasible_shards"),
            ("shardcore.search.greedy", "feasible_shards"),
            ("shardcore.search.beam", "feasible_shards")],
    "starts": [("shardcore.search.anneal.starts", "Starts.make")],
    "anneal": [("shardcore.search.anneal.sharder", "Search.run")],
    "final": [("shardcore.search.anneal.sharder", "priced"),
              ("shardcore.search.placement_state", "PlacementState.plan")],
    "range": [("shardcore.cost.composite", "out_of_range")],
    "explain": [("shardcore.search.explain", "explain")],
    "write": [("shardcore.files", "write_plan")],
}
"""Parts of the command, and the functions of which each is made."""


def one(arguments: list[str]) -> None:
    """Run the command in this process; its last line is JSON: the seconds of each part and of the search."""
    import importlib

    from shardcore import progress
    from shardcore.cli import main as command
    from shardcore.search import SHARDERS

    if arguments[0] == "--processor":
        _, *arguments = arguments
        progress.time = SimpleNamespace(monotonic=time.process_time)
        time.perf_counter = time.process_time
    seconds = dict.fromkeys([*PARTS, "search"], 0.0)
    for part, places in PARTS.items():
        for module, name in places:
            owner = importlib.import_module(module)
            *path, name = name.split(".")
            owner = getattr(owner, path[0]) if path else owner
            setattr(owner, name, _timed(getattr(owner, name), part, seconds))
    for name, sharder in SHARDERS.items():
        SHARDERS[name] = _timed(sharder, "search", seconds)
    code = command(arguments)
    print(json.dumps({**seconds, "code": code}))


_inside: list[str] = []


def _timed(of: Callable, part: str, seconds: dict[str, float]) -> Callable:
    """The function, the seconds of its outermost calls counted; nothing is counted within an explanation."""
    def timed(*args: Any, **kwargs: Any) -> Any:
        if part in _inside or "explain" in _inside:
            return of(*args, **kwargs)
        _inside.append(part)
        began = time.perf_counter()
        try:
            return of(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - began
            _inside.pop()

    return timed


def run(problem: Problem, model: str, processor: bool, *arguments: str) -> dict[str, Any]:
    """What one command took: seconds by the clock and of the processor, MiB at most, what it said, the
    seconds of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        files.write_problem(path, problem)
        began = time.perf_counter()
        command = ["--one", *["--processor"] * processor, "plan", str(path), "--model", model, "--out",
                   f"{folder}/plan.json"]
        process = subprocess.Popen([sys.executable, "-m", "bench.limits", *command, *arguments], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        said, errors = process.stdout.read(), process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        lines = said.splitlines()
        parts = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return {"seconds": time.perf_counter() - began, "processor": used.ru_utime + used.ru_stime,
                "mib": used.ru_maxrss / 1024, "said": errors.strip(), **parts,
                "found": next((line for line in lines if "ms predicted" in line), "")}


def problem(model: NeuralModel, n_tables: int, n_devices: int, zipf: bool) -> Problem:
    from bench import sizes  # with torch, which the command does without

    made = sizes.problem(model, n_tables, n_devices)
    if not zipf:
        return made
    rng = np.random.default_rng(n_tables)
    drawn = zip(made.tables, 10 ** rng.uniform(2, 7, n_tables), rng.uniform(0.6, 1.6, n_tables), strict=True)
    tables = tuple(dataclasses.replace(t, access=Zipf(float(a)), rows=int(rows)) for t, rows, a in drawn)
    return with_memory(dataclasses.replace(made, tables=tables), 1.5)


def with_memory(of: Problem, times: float) -> Problem:
    """The problem with so many times the memory that its tables need, evenly."""
    from shardcore.search.packing import least_bytes

    each = int(times * least_bytes(of) / len(of.topology))
    devices = tuple(dataclasses.replace(d, memory_bytes=each) for d in of.topology.devices)
    return dataclasses.replace(of, topology=dataclasses.replace(of.topology, devices=devices))


def too_large(of: Problem) -> Iterator[tuple[str, Problem]]:
    yield "1% too little", with_memory(of, 0.99)
    yield "a tenth of it", with_memory(of, 0.1)
    yield "just enough, no gap to spare", with_memory(of, 1.0)
    first, *others = of.tables
    rows = int(1.1 * of.topology.devices[0].memory_bytes / (first.dim * 4))
    whole = Constraints(unsplit=(first.name,))
    large = dataclasses.replace(of, tables=(dataclasses.replace(first, rows=rows), *others),
                                constraints=whole)
    yield "the largest must stay whole", large


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a trained model")
    parser.add_argument("--sizes", nargs="*", default=["x".join(map(str, s)) for s in SIZES],
                        metavar="TABLESxDEVICES")
    parser.add_argument("--algorithms", nargs="*", default=["anneal_columns", "anneal"])
    parser.add_argument("--budgets", nargs="*", type=float, default=[5.0, 30.0], metavar="SECONDS")
    parser.add_argument("--zipf", action="store_true", help="each table has a power law of its own")
    parser.add_argument("--processor", action="store_true",
                        help="count the processor's seconds, not the clock's")
    parser.add_argument("--explain", action="store_true",
                        help="with --explain, each of its searches within the budget too")
    args = parser.parse_args()
    model = load(args.model)
    rows, refusals = [], []
    for size in args.sizes:
        made = problem(model, *map(int, size.split("x")), args.zipf)
        for name, budget in ((n, b) for n in args.algorithms for b in args.budgets):
            f = run(made, args.model, args.processor, "--algorithm", name, "--budget-s", f"{budget:g}",
                    *["--explain"] * args.explain)
            over = f.get("search", np.nan) - budget
            kept = "yes" if over <= ALLOWED[0] * budget + ALLOWED[1] else "NO"
            ms = f["found"].partition(": ")[2].partition(" ms")[0]
            rows.append((size, name, f"{budget:g}", *(f"{f.get(p, np.nan):.1f}" for p in PARTS),
                         f"{over:.1f}", kept,
                         f"{f['processor']:.1f}", f"{f['seconds']:.1f}", f"{f['mib']:.0f}", ms or f["said"]))
            print(f"{size} {name} {budget:g} s: {f['seconds']:.1f} s", file=sys.stderr, flush=True)
        for what, too_much in too_large(made):
            f = run(too_much, args.model, args.processor, "--algorithm", args.algorithms[0], "--budget-s",
                    f"{args.budgets[0]:g}")
            refusals.append((size, what, f"{f.get('read', np.nan):.1f}", f"{f['processor']:.1f}",
                             f"{f['seconds']:.1f}", f"{f['mib']:.0f}", f["said"][:120] or "a plan"))
            print(f"{size} {what}: {f['seconds']:.1f} s", file=sys.stderr, flush=True)
    headers = ("tables x devices", "algorithm", "budget s", *PARTS, "over", "kept", "cpu s", "all s",
               "peak MiB", "ms")
    print(report.text_table(headers, rows))
    print()
    print(report.text_table(("tables x devices", "memory", "read s", "cpu s", "all s", "peak MiB", "said"),
                            refusals))


if __name__ == "__main__":
    main()
