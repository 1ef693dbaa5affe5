"""Run git, and read the commit of this checkout for provenance."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from shardcore.core.errors import ShardCoreError
from tasks.paths import LOCK


def git_commit() -> str:
    """Git commit of the working directory, with "-dirty" if tracked files other than dvc.lock have changed."""
    try:
        commit = git("rev-parse", "HEAD")
    except ShardCoreError:
        return "no git"
    # A run writes into dvc.lock what it made. That is not of the code.
    return f"{commit}-dirty" if has_uncommitted_changes(":/", f":(exclude){LOCK}") else commit


def has_uncommitted_changes(*paths: str) -> bool:
    """Tell if tracked files differ from the last git commit, or nothing is committed."""
    return bool(_run_git(("diff", "--quiet", "HEAD", "--", *paths), None).returncode)


def git(*arguments: str, cwd: Path | None = None) -> str:
    """Run a git command and return its output. Raises ShardCoreError with git's last line if the command fails."""
    done = _run_git(arguments, cwd)
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise ShardCoreError(f"git {arguments[0]} failed in {cwd or os.getcwd()}: {last}")
    return done.stdout.strip()


def _run_git(arguments: tuple[str, ...], cwd: Path | None) -> subprocess.CompletedProcess:
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
