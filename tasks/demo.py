"""`python -m tasks.demo`: make .demo/ a clone of this folder, in which `make demo` runs the whole pipeline.

The clone has its own parameters, data, models and plans, so nothing here changes. A demo that was killed goes on.
Remove the folder for another one from the beginning.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from shardcore.core.errors import ShardCoreError
from shardcore.core.jit import copy_compiled

FOLDER = Path(".demo")


def clone(source: Path, folder: Path) -> None:
    """Make a folder a clone of a repository at its last commit. Data, models and plans in it stay.

    Raises ShardCoreError if git fails, or the folder is something else.
    """
    commit = _git(source, "rev-parse", "HEAD")
    if not folder.exists():
        # Renamed once it is whole: a clone that was killed has no files.
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        _git(source, "clone", "--quiet", "--shared", ".", str(part))
        part.rename(folder)
        # Without it, the clone would compile the searches for a quarter of a minute.
        copy_compiled(source / "shardcore", folder / "shardcore")
    elif not (folder / ".git").exists():
        raise ShardCoreError(f"{folder} is not a clone for the demo; remove it")
    elif _git(folder, "rev-parse", "HEAD") != commit:
        # Parameters and dvc.lock of the last demo are replaced.
        _git(folder, "fetch", "--quiet", "origin", "HEAD")
        _git(folder, "checkout", "--quiet", "--force", "--detach", commit)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, text=True, capture_output=True, check=False)
    except OSError as error:
        raise ShardCoreError(f"git cannot be run: {error.strerror}; the demo runs in a clone") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ShardCoreError(f"git {arguments[0]} in {folder.resolve()}: {last}; the demo runs in a clone")
    return done.stdout.strip()


def main() -> None:
    try:
        clone(Path.cwd(), Path.cwd() / FOLDER)
    except ShardCoreError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
