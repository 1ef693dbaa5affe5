"""The commit of this checkout, for provenance."""

from __future__ import annotations

import subprocess

_RUNS = ":(exclude)dvc.lock"
"""Not of the code: a run writes there what it made."""


def git_commit() -> str:
    """The commit of this folder, with "-dirty" if tracked files other than dvc.lock differ from it."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "no git"
    same = _git("diff", "--quiet", "HEAD", "--", ":/", _RUNS) is not None
    return commit if same else f"{commit}-dirty"


def _git(*arguments: str) -> str | None:
    """The output of git. None: it failed."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
