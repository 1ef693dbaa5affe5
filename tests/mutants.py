"""Mutation score of a room: which share of random one-line defects do its own tests notice?

    make mutants ROOM=step                    40 defects of shardcore/step, judged by tests/step
    python tests/mutants.py core/topology.py --tests tests/core/test_topology.py --mutants 10

cosmic-ray makes the defects, one at a time, in a copy of the last commit (.mutants). With --keep it goes on
with a copy where it was cut off.
"""

import argparse
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome

ROOT = Path(__file__).parents[1]
COPY = ROOT / ".mutants"
CONFIG = """
[cosmic-ray]
module-path = "shardcore/{room}"
timeout = 600.0
excluded-modules = []
test-command = "{python} -m pytest -n 0 -q -x -p no:cacheprovider {tests}"
distributor.name = "local"
# An annotation such as `int | None` is never run. Shifts and bits are no slips that people make.
filters.operators-filter.exclude-operators = [
    "core/ReplaceBinaryOperator_(BitOr|BitAnd|BitXor)_.*",
    "core/ReplaceBinaryOperator_.*_(RShift|LShift|BitOr|BitAnd|BitXor|Pow|Mod)",
    "core/ReplaceUnaryOperator_.*",
]
"""


def run(*command: str) -> None:
    subprocess.run(command, cwd=COPY, check=True)


def draw(mutants: int) -> None:
    """Keep so many random defects of the session. Identifiers are random, so their order is."""
    with sqlite3.connect(COPY / "session.sqlite") as session:
        session.execute(
            "CREATE TEMP TABLE drawn AS SELECT job_id FROM work_items "
            "WHERE job_id NOT IN (SELECT job_id FROM work_results) ORDER BY job_id LIMIT ?",
            (mutants,),
        )
        for table in ("work_results", "mutation_specs", "work_items"):
            session.execute(f"DELETE FROM {table} WHERE job_id NOT IN (SELECT job_id FROM drawn)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("room", help="folder or file of shardcore/")
    parser.add_argument("--tests", help="what judges (tests/ROOM)")
    parser.add_argument("--mutants", type=int, default=40, help="number of defects (40)")
    parser.add_argument("--keep", action="store_true", help="go on with the session that was cut off")
    args = parser.parse_args()
    tests = args.tests or f"tests/{args.room}"
    for path in (f"shardcore/{args.room}", tests):
        if not (ROOT / path).exists():
            parser.error(f"{path} is not there; name a room such as step, or a file with its --tests")
    if args.mutants < 1:
        parser.error(f"--mutants is {args.mutants}; it needs to be 1 or more")
    if args.keep and not (COPY / "session.sqlite").exists():
        parser.error(f"--keep has no session in {COPY}; run without it")
    if not args.keep:
        shutil.rmtree(COPY, ignore_errors=True)
        COPY.mkdir()
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        subprocess.run(["tar", "-x", "-C", COPY], input=archive, check=True)
        (COPY / "room.toml").write_text(CONFIG.format(room=args.room, python=sys.executable, tests=tests))
        run("cosmic-ray", "init", "room.toml", "session.sqlite")
        run("cr-filter-operators", "session.sqlite", "room.toml")
        draw(args.mutants)
    run("cosmic-ray", "baseline", "room.toml")
    run("cosmic-ray", "exec", "room.toml", "session.sqlite")
    with use_db(COPY / "session.sqlite", WorkDB.Mode.open) as session:
        results = [result for _, result in session.results]
    outcomes = Counter(result.test_outcome for result in results)
    for result in results:
        if result.test_outcome is TestOutcome.SURVIVED:
            print(result.diff)
    noticed = len(results) - outcomes[TestOutcome.SURVIVED]
    print(f"{args.room}: {noticed} of {len(results)} defects noticed")


if __name__ == "__main__":
    main()
