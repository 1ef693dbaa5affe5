"""Kills at random instants: of a process of a run with SIGTERM, SIGINT or SIGKILL, and what is left of the
run then.

The victim is one of a kind that was struck least often so far, or most kills would strike Ray's many workers.

The runs are those of a scratch project at toy size: `make run` (without its setup), `flows.measure` and
`flows.publish` alone, and a publish on a stack, of which any process is killed, or the watch. A kill is one
row:

- ended: the run's exit code and how long after the kill it ended; a run that a kill does not end goes on, and
  is waited for; one that failed later than 15 s after the kill failed late
- processes: of the run, or of what it started, alive 15 s after the kill (where the run goes on: after its
  end); late: where it goes on, those 15 s after the kill
- folders: left in the temporary directory then
- lock: whether DVC's is free then
- open: which of its processes listened at more than loopback before
- next: whether the next run went on: it came to its own kill, or ended well. The last run of each kind is not
  killed

Of the stack: what `make down` left, and whether `make up` brought all back. Rows are kept in --out, so a
bench that was stopped goes on. Exit code 1 where something was left, or a next run failed.

  python -m bench.kills --out kills.jsonl                     100 kills
  python -m bench.kills --out kills.jsonl --kills run=5       some of them
  python -m bench.kills --say kills.jsonl more.jsonl          the tables of both
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.processes import MARK, Run, draw_victim, name_of, open_to_others
from shardcore import report
from shardcore.core.types import Setting
from shardcore.io import files
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from tasks import services
from tasks.tables import TablesConfig, make_pool

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests/flows"))
from scratch import TOY, copy_project  # noqa: E402

KILLS = {"run": 40, "measure": 25, "publish": 15, "stack": 10, "watch": 10}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
PATIENCE_S = 15.0
LONGEST_S = 600.0
"""Of a run that goes on after a kill, and of one that is not killed."""
SMALLER = {
    "measure": {"compute_samples": 60, "comm_samples": 24, "step_samples": 1},
    "train": {"epochs": 4},
    "evaluate": {"problems": 1, "replay_problems": 1},
}
"""Than the toy sizes of the tests."""
HEADERS = (
    "killed",
    "kills",
    "ended in 15 s",
    "slowest end s",
    "went on",
    "failed late",
    "processes left",
    "folders left",
    "locks held",
    "open to others",
    "next run went on",
)


@dataclass
class Bench:
    """project: the scratch copy, of `commit`; temporary: its temporary directory; out: of the rows."""

    folder: Path
    temporary: Path
    out: Path
    env: dict[str, str]
    rows: list[dict[str, Any]]
    commit: str
    of_before: int
    """Rows of another scratch project."""
    run_s: float = 0.0
    """Of an undisturbed `make run`."""

    def start(self, *command: str) -> Run:
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with open(self.folder / "said.log", "w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env={**self.env, MARK: mark},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Run(process, mark)

    def to_the_end(self, *command: str) -> float:
        """Run a command; the seconds it took. Ends this program where it fails."""
        began, run = time.monotonic(), self.start(*command)
        code = run.process.wait(LONGEST_S)
        if code:
            sys.exit(f"{' '.join(command)} ended with exit code {code}:\n{self.said()}")
        print(f"{time.monotonic() - began:.0f} s undisturbed: {' '.join(command)}", flush=True)
        return time.monotonic() - began

    def said(self) -> str:
        return (self.folder / "said.log").read_text()[-2000:]

    def left(self) -> list[str]:
        return sorted(os.listdir(self.temporary))

    def lock(self) -> str:
        """Who holds DVC's lock: nobody ("free"), or living processes."""
        path = self.folder / ".dvc/tmp"
        holders = []
        if (path / "lock").exists():
            with open(path / "lock") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    holders.append(lock.read().strip())
        if (path / "rwlock").exists():
            kept = json.loads((path / "rwlock").read_text() or "{}")
            found = [
                *kept.get("write", {}).values(),
                *(info for infos in kept.get("read", {}).values() for info in infos),
            ]
            holders += [str(info["pid"]) for info in found if psutil.pid_exists(info["pid"])]
        return ", ".join(sorted(set(holders))) or "free"

    def keep(self, row: dict[str, Any]) -> None:
        row |= {"commit": self.commit, "load": round(os.getloadavg()[0], 1)}
        self.rows.append(row)
        with open(self.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    # --- a kill ---------------------------------------------------------------------------------------------

    def kill(self, kind: str, command: tuple[str, ...], longest_s: float, seed: str) -> tuple[bool, bool]:
        """Start a command, kill one of its processes at a random instant, and keep what came of it. Whether
        it was killed (it may have ended by itself before), and whether it did all that it had to."""
        rng = random.Random(seed)
        at_s, run = rng.uniform(0.2, longest_s), self.start(*command)
        began = time.monotonic()
        while time.monotonic() - began < at_s and not run.ended():
            run.look()
            time.sleep(min(0.3, max(0.0, at_s - (time.monotonic() - began))))
        if run.ended():
            self.went_on(kind, run.process.returncode == 0)
            self.wait_until_gone(run)
            return False, True
        self.went_on(kind, True)
        tree = run.look()
        listening = open_to_others(tree)
        victim, number = draw_victim(tree, self.rows, rng), rng.choice(SIGNALS)
        name = name_of(victim)
        with contextlib.suppress(psutil.Error):
            victim.send_signal(number)
        struck, late = time.monotonic(), None
        while not run.ended() and time.monotonic() < struck + LONGEST_S:
            alive = run.look()
            if late is None and time.monotonic() > struck + PATIENCE_S:
                late = sorted(map(name_of, alive))
            time.sleep(0.2)
        ended_s = time.monotonic() - struck
        gone_s = self.wait_until_gone(
            run, max(0.0, PATIENCE_S - ended_s) if ended_s < PATIENCE_S else PATIENCE_S
        )
        alive = [name_of(p) for p in run.look()]
        self.keep(
            {
                "kind": kind,
                "seed": seed,
                "at_s": round(at_s, 1),
                "victim": name,
                "signal": signal.Signals(number).name,
                "code": run.process.poll(),
                "ended_s": round(ended_s, 1),
                "gone_s": round(gone_s, 1),
                "late": late,
                "processes": alive,
                "folders": self.left(),
                "lock": self.lock(),
                "open": listening,
                "next": None,
                "said": self.said().strip().splitlines()[-1:],
            }
        )
        for process in run.look():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for left in self.left():
            shutil.rmtree(self.temporary / left, ignore_errors=True)
        return True, run.process.poll() == 0

    def wait_until_gone(self, run: Run, patience_s: float = PATIENCE_S) -> float:
        began = time.monotonic()
        while (run.look() or self.left() or self.lock() != "free") and time.monotonic() < began + patience_s:
            time.sleep(0.2)
        return time.monotonic() - began

    def went_on(self, kind: str, well: bool) -> None:
        """What the run after a kill came to, for the row of the kill."""
        before = [row for row in self.rows[self.of_before :] if row["kind"] == kind]
        if before and before[-1]["next"] is None:
            before[-1]["next"] = well
            self.write_all()
            if not well:
                print(f"the run after {before[-1]['seed']} failed:\n{self.said()}", flush=True)

    def write_all(self) -> None:
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        temporary.replace(self.out)

    # --- the kinds ------------------------------------------------------------------------------------------

    def forget(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def kills_of(self, kind: str, count: int, seed: int) -> None:
        """Kills of a kind until there are `count`; what a run finished is forgotten where there is nothing
        left to do."""
        command = {
            "run": ("tasks.services", sys.executable, "-m", "flows.refresh"),
            "measure": ("flows.measure",),
            "publish": ("flows.publish",),
        }[kind]
        everything = {
            "run": ("data/pool.json", "data/measurements", "data/model", "dvc.lock", "plans", ".dvc/cache"),
            "measure": ("data/measurements",),
            "publish": ("plans",),
        }[kind]
        before = [row for row in self.rows if row["kind"] == kind]
        if len(before) >= count:
            return
        self.forget(*everything)
        longest_s = self.run_s if kind == "run" else self.to_the_end(*command)
        number, times = len(before), 0
        self.forget(*everything)
        while number < count:
            times += 1
            killed, done = self.kill(kind, command, longest_s, f"{kind}-{seed}-{number}-{times}")
            number += killed
            if done:
                self.forget(*everything)
        code = self.start(*command).process.wait(LONGEST_S)
        self.went_on(kind, code == 0)

    def kills_of_the_stack(self, kind: str, count: int, seed: int) -> None:
        """Kills of any process of a stack on which plans are published, or of the watch."""
        done = len([row for row in self.rows if row["kind"] == kind])
        if done >= count:
            return
        self.to_the_end("tasks.stack", "up")
        client = {"RAY_ADDRESS": "", **self.client_env()}
        self.env.update(client)
        self.to_the_end("flows.promote")
        for number in range(done, count):
            rng = random.Random(f"{kind}-{seed}-{number}")
            plans = self.start("flows.publish")
            time.sleep(at_s := rng.uniform(0.2, 12))
            tree = [p for p in psutil.process_iter() if self.is_of_the_stack(p)]
            if kind == "watch":
                tree = [p for p in tree if name_of(p) == "watch"]
            listening = open_to_others(tree)
            victim, signal_ = draw_victim(tree, self.rows, rng), rng.choice(SIGNALS)
            name = name_of(victim)
            victim.send_signal(signal_)
            struck = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                plans.process.wait(LONGEST_S)
            ended_s, said = time.monotonic() - struck, self.said()
            gone_s = self.wait_until_gone(plans)
            alive = [name_of(p) for p in plans.look()]
            up = self.start("tasks.stack", "up").process.wait(LONGEST_S)
            again = self.start("flows.publish").process.wait(LONGEST_S)
            last = self.said().strip().splitlines()[-1:]
            if number % 5 == 4 or number == count - 1:
                self.to_the_end("tasks.stack", "down")
                alive += [name_of(p) for p in psutil.process_iter() if self.is_of_the_stack(p)]
                if number < count - 1:
                    self.to_the_end("tasks.stack", "up")
            self.keep(
                {
                    "kind": kind,
                    "seed": f"{kind}-{seed}-{number}",
                    "at_s": round(at_s, 1),
                    "victim": name,
                    "signal": signal.Signals(signal_).name,
                    "code": plans.process.poll(),
                    "ended_s": round(ended_s, 1),
                    "gone_s": round(gone_s, 1),
                    "processes": alive,
                    "folders": self.left(),
                    "lock": self.lock(),
                    "open": listening,
                    "next": up == 0 and again == 0,
                    "up": up,
                    "again": again,
                    "said": [*said.strip().splitlines()[-1:], *last],
                }
            )
        for name in client:
            self.env.pop(name)

    def is_of_the_stack(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("SHARDCORE_DAEMON", "").startswith(str(self.folder))
        except (psutil.Error, OSError):
            return False

    def client_env(self) -> dict[str, str]:
        said = subprocess.check_output(
            ["sh", "-c", ". .stack/env.sh; env -0"], cwd=self.folder, env=self.env, text=True
        )
        found = dict(entry.split("=", 1) for entry in said.split("\0") if "=" in entry)
        return {k: v for k, v in found.items() if self.env.get(k) != v}


@contextlib.contextmanager
def scratch_bench(out: Path) -> Iterator[Bench]:
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    with contextlib.ExitStack() as stack:
        folder, temporary, home = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"k{c}", dir="/tmp"))) for c in "pth"
        )
        made = copy_project(folder, "", home)
        env = {
            k: v
            for k, v in made.env.items()
            if k not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "MAKELEVEL")
        }
        env |= {
            "TMPDIR": str(temporary),
            "GIT_CONFIG_GLOBAL": str(home / "gitconfig"),
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DVC_NO_ANALYTICS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        held = [stack.enter_context(services.reserve_port()) for _ in range(6)]
        names = (
            "prefect_port",
            "mlflow_port",
            "ray_port",
            "ray_client_port",
            "dashboard_port",
            "metrics_port",
        )
        params = yaml.safe_load((folder / "params.yaml").read_text())
        for section, values in SMALLER.items():
            params[section] |= values
        params["stack"] = {name: taken.getsockname()[1] for name, taken in zip(names, held, strict=True)}
        (folder / "params.yaml").write_text(yaml.safe_dump(params))
        commit = subprocess.check_output(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True
        ).strip()
        bench = Bench(folder, temporary, out, env, rows, commit, len(rows))
        try:
            yield bench
        finally:
            if (folder / ".stack").exists():
                subprocess.run(
                    [sys.executable, "-m", "tasks.stack", "down"],
                    cwd=folder,
                    env=env,
                    stdout=subprocess.DEVNULL,
                )


def table(rows: list[dict[str, Any]], by: str = "kind") -> list[tuple[Any, ...]]:
    """A line for each kind of run, or of process (`by` "victim")."""
    found = []
    for kind in dict.fromkeys(row[by] for row in rows):
        mine = [row for row in rows if row[by] == kind]
        ended, known = (
            [row for row in mine if row["ended_s"] <= PATIENCE_S],
            [row for row in mine if row["next"] is not None],
        )
        wrong = [sum(is_wrong(row) for row in mine) for is_wrong in WRONG.values()]
        slowest_s = max((row["ended_s"] + row["gone_s"] for row in ended), default=0)
        found.append(
            (
                kind,
                len(mine),
                len(ended),
                f"{slowest_s:.1f}",
                len(mine) - len(ended) - wrong[0],
                *wrong,
                f"{sum(row['next'] for row in known)} of {len(known)}",
            )
        )
    return found


WRONG: dict[str, Callable[[dict[str, Any]], bool]] = {
    "late": lambda row: (
        row["kind"] not in ("stack", "watch") and row["ended_s"] > PATIENCE_S and row["code"] != 0
    ),
    "processes": lambda row: bool(row["processes"]),
    "folders": lambda row: bool(row["folders"]),
    "lock": lambda row: row["lock"] != "free",
    "open": lambda row: bool(row["open"]),
}


def say(rows: list[dict[str, Any]]) -> int:
    """Print tables of kills, and those that left something or whose next run failed; how many these are."""
    for by in ("kind", "victim"):
        print(report.text_table(HEADERS, table(rows, by)) + "\n")
    bad = [row for row in rows if row["next"] is False or any(wrong(row) for wrong in WRONG.values())]
    for row in bad:
        print(json.dumps(row))
    print(f"{len(rows)} kills, {len(bad)} with something wrong")
    return len(bad)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="a line of JSON for each kill; those there are not repeated")
    what.add_argument("--say", type=Path, nargs="+", metavar="OUT", help="only print the tables of all these")
    parser.add_argument(
        "--kills", nargs="*", default=[f"{k}={n}" for k, n in KILLS.items()], metavar="KIND=COUNT"
    )
    parser.add_argument("--seed", type=int, default=0, help="of instants, processes and signals (0)")
    args = parser.parse_args()
    if args.say:
        return (
            1 if say([json.loads(line) for path in args.say for line in path.read_text().splitlines()]) else 0
        )
    # what a shell runs beside itself ignores SIGINT, and so would all it starts
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    with scratch_bench(args.out) as bench:
        wanted = {kind: int(count) for kind, count in (text.split("=") for text in args.kills)}
        pool = make_pool.fn(TablesConfig(**TOY["tables"]))
        for number in range(2):
            problem = draw_problem(pool, number, Setting("any", 64), 0, ProblemConfig(devices=2, max_dim=32))
            files.write_problem(bench.folder / f"problems/draw-{number}.json", problem)
        bench.run_s = bench.to_the_end("tasks.services", sys.executable, "-m", "flows.refresh")
        for kind, count in wanted.items():
            (bench.kills_of_the_stack if kind in ("stack", "watch") else bench.kills_of)(
                kind, count, args.seed
            )
    print(f"seed {args.seed}; {time.monotonic() - began:.0f} s now")
    return 1 if say(bench.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
