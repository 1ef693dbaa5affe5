"""A stack of its own in a scratch project with toy parameters, which ends and goes with the context that made
it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks import services
from tasks.stack_config import StackConfig
from tasks.stack_services import client_env

ROOT = Path(__file__).parents[1]
PARAMS = {
    "setting": {"batch": 64},
    "tables": {"tables": 40},
    "measure": {
        "compute_samples": 120,
        "comm_samples": 24,
        "max_shards": 6,
        "arena_bytes": 1 << 28,
        "min_repeats": 3,
        "max_repeats": 3,
        "comm_repeats": 3,
    },
    "train": {"epochs": 8, "learning_curve": False},
    "publish": {"budget_evals": 200},
}


@dataclass
class ToyStack:
    """project: its folder; env: of its commands; config: of the stack."""

    project: Path
    env: dict[str, str]
    config: StackConfig

    def run(self, *command: str, client: bool = True) -> None:
        """A module as a program, as a client of the stack; says how long it took, and ends this process where
        it fails."""
        env = {**self.env, **(self.client_env() if client else {})}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.project,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(f"{time.monotonic() - began:6.1f} s  {' '.join(command)}", flush=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}:\n{done.stdout[-4000:]}")

    def client_env(self) -> dict[str, str]:
        folder = self.project / self.config.folder
        return client_env(self.config, folder, (folder / "token").read_text().strip())

    def promote_a_model(self, problems: int = 1) -> None:
        """A pool of tables, problems, measurements, and a first champion."""
        self.run("flows.tables")
        for i in range(problems):
            self.run(
                "shardcore",
                "problem",
                "data/pool.json",
                "--draw",
                str(i),
                "--batch",
                "64",
                "--devices",
                "2",
                "--max-dim",
                "32",
                "--out",
                f"problems/draw-{i}.json",
            )
        for stage in ("measure", "train", "promote"):
            self.run(f"flows.{stage}")

    def set_params(self, section: str, **values: Any) -> None:
        path = self.project / "params.yaml"
        params = yaml.safe_load(path.read_text())
        params[section] |= values
        path.write_text(yaml.safe_dump(params))


@contextmanager
def toy_stack(env: Mapping[str, str] | None = None, **settings: str) -> Iterator[ToyStack]:
    """A healthy stack; settings: of its StackConfig, the ports aside, which are free ones."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that all of it ends
    with tempfile.TemporaryDirectory(prefix="toy-") as scratch:
        project = Path(scratch)
        shutil.copytree(ROOT / "flows", project / "flows", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "prefect.yaml", project)
        held = {
            f"{name}_port": services.reserve_port()
            for name in ("prefect", "mlflow", "ray", "ray_client", "dashboard", "metrics")
        }
        ports = {name: taken.getsockname()[1] for name, taken in held.items()}
        (project / "params.yaml").write_text(yaml.safe_dump({**PARAMS, "stack": {**ports, **settings}}))
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
        made = ToyStack(
            project,
            {**ours, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **(env or {})},
            StackConfig(**ports, **settings),
        )
        try:
            made.run("tasks.stack", "up", client=False)
            yield made
        finally:
            subprocess.run([sys.executable, "-m", "tasks.stack", "down"], cwd=project, env=made.env)
            for taken in held.values():
                taken.close()
