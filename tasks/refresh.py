"""DVC from Prefect: rebuild what changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from prefect import get_run_logger, task

from shardcore.types import ShardCoreError
from tasks import services

_PREFECT_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d+ \| \w+ +\| ((Task|Flow) run '[^']*' - )?")
STAGES = ("tables", "measure", "train", "evaluate")


@task(task_run_name="dvc-repro-{target}")
def repro(target: str) -> None:
    """`dvc repro` of a stage and what it depends on, its lines in the run's log; raises ShardCoreError where a stage fails."""
    if target not in STAGES:
        raise ShardCoreError(f"stage {target!r} is not known; there are {', '.join(STAGES)}")
    logger = get_run_logger()
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # the stages' `python` is this one
    process = subprocess.Popen([sys.executable, "-m", "dvc", "repro", target], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, env={**os.environ, "PATH": here}, preexec_fn=services.die_with_parent)
    reason = ""
    for line in process.stdout:
        message = _PREFECT_PREFIX.sub("", line.rstrip())
        if message:
            logger.info("%s", message)
        if message.lower().startswith("error: ") and not reason:
            reason = message.split(": ", 1)[1]
    if process.wait():
        raise ShardCoreError(reason or f"dvc repro {target} ended with exit code {process.returncode}")
