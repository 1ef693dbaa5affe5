"""git: the commit of this checkout, for provenance, and commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from shardcore.core.errors import ShardCoreError
from tasks.paths import LOCK


def git_commit() -> str:
    """The commit of this folder, with "-dirty" if tracked files other than dvc.lock differ from it."""
    try:
        commit = git("rev-parse", "HEAD")
    except ShardCoreError:
        return "no git"
    # A run writes into dvc.lock what it made. That is not of the code.
    return f"{commit}-dirty" if differs(":/", f":(exclude){LOCK}") else commit


def differs(*paths: str) -> bool:
    """Tell if tracked files differ from the last commit, or there is none."""
    return bool(_run(("diff", "--quiet", "HEAD", "--", *paths), None).returncode)


def git(*arguments: str, cwd: Path | None = None) -> str:
    """The output of a git command. Raises ShardCoreError with the last line of git if it fails."""
    done = _run(arguments, cwd)
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise ShardCoreError(f"git {arguments[0]} failed in {cwd or os.getcwd()}: {last}")
    return done.stdout.strip()


def _run(arguments: tuple[str, ...], cwd: Path | None) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as error:
        raise ShardCoreError(f"git cannot be run: {error.strerror}") from None
