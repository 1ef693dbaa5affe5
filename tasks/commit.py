"""The commit of this checkout, for provenance."""

from __future__ import annotations

import subprocess


def git_commit() -> str:
    """The commit of this folder, with "-dirty" if tracked files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "no git"
    return found.stdout.strip() or "no git"
