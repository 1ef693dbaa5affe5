"""The failures of issue 7 repeated at random instants: every test that takes the fixture `outcome`, each with
seeds of its own.

Real processes get SIGKILL, a real file system is full, real files are damaged (tests/flows/test_failures.py,
test_measure.py, tests/plans/test_store_shared.py say how). The table has, for each: how often, how often
the work still ran when it struck, how often it ended in a state that one line tells, what was lost (samples,
versions, plans, models), and how often the next run completed. What was done is kept in --out, so a bench
that was stopped goes on. Exit code 1 where anything failed.

  python bench/failures.py --out failures.jsonl                       each 10 times: 70 minutes on 2 cores
  python bench/failures.py --out failures.jsonl --times 3 -k mlflow   some of them, as pytest's -k
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardcore import report

ROOT = Path(__file__).parents[1]
FILES = ("tests/plans/test_store_shared.py", "tests/flows/test_measure.py", "tests/flows/test_failures.py")
HEADERS = ("failure", "times", "struck while it ran", "clear state", "lost", "next run completed")


class Repeat:
    """A pytest plugin: runs the tests with an `outcome` for each of the seeds, and keeps what came of
    them."""

    def __init__(self, seeds: range, out: Path):
        self._seeds, self._out = seeds, out

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "outcome" in metafunc.fixturenames:
            done = {(r["test"], r["seed"]) for r in read(self._out)}
            seeds = [s for s in self._seeds if (metafunc.function.__name__, s) not in done]
            metafunc.parametrize("seed", seeds)

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items[:] = [i for i in items if "outcome" in i.fixturenames and hasattr(i, "callspec")]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo) -> Any:
        found = yield
        if call.excinfo and call.excinfo.errisinstance(SystemExit):  # Ray's answer to SIGTERM
            pytest.exit("stopped")
        if call.when == "call" or found.failed:
            row = {
                "test": item.originalname,
                "seed": item.callspec.params["seed"],
                "result": found.outcome,
                "seconds": round(call.duration, 1),
                "hit": False,
                "said": "",
                "lost": None,
                "completed": False,
            }
            if found.failed:
                row["why"] = str(getattr(found.longrepr, "reprcrash", None) or found.longrepr)[-600:]
            if "outcome" in item.funcargs:
                row |= vars(item.funcargs["outcome"])
            with open(self._out, "a") as f:
                f.write(json.dumps(row) + "\n")
        return found


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """A row for each failure, from those of its repeats."""
    tests = dict.fromkeys(r["test"] for r in rows)
    found = []
    for test in tests:
        mine = [r for r in rows if r["test"] == test and r["result"] != "skipped"]
        lost = "unknown" if any(r["lost"] is None for r in mine) else sum(r["lost"] for r in mine)
        found.append(
            (
                test.removeprefix("test_").replace("_", " "),
                len(mine),
                sum(r["hit"] for r in mine),
                sum(bool(r["said"]) for r in mine),
                lost,
                sum(r["completed"] for r in mine),
            )
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a line of JSON for each repeat; those there are not repeated"
    )
    parser.add_argument("--times", type=int, default=10, help="(10)")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds (0)")
    parser.add_argument("-k", default="", help="which, as pytest's -k")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers end with the bench
    began = time.monotonic()
    plugin = Repeat(range(args.seed, args.seed + args.times), args.out)
    files = [str(ROOT / name) for name in FILES]
    pytest.main(
        ["-n", "0", "-m", "", "-q", "--no-header", "-k", args.k, "--rootdir", str(ROOT), *files],
        plugins=[plugin],
    )
    rows = read(args.out)
    print(report.text_table(HEADERS, table(rows)))
    bad = [r for r in rows if r["result"] == "failed"]
    for r in bad:
        print(f"failed: {r['test']} with seed {r['seed']}: {r['why']}")
    print(f"\n{len(rows)} repeats, {len(bad)} failed; {time.monotonic() - began:.0f} s this time")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
