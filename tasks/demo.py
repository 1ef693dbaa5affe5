"""`python -m tasks.demo`: make .demo/ a clone of this folder, in which `make demo` runs the whole pipeline.

The clone has its own parameters, data, models and plans, so nothing here changes. A demo that was killed goes on.
Remove the folder for another one from the beginning.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from shardcore.core.errors import ShardCoreError
from shardcore.core.jit import copy_compiled_code
from tasks.commit import git

FOLDER = Path(".demo")


def clone(source: Path, folder: Path) -> None:
    """Clone a git repository into a folder, or update a clone, keeping the clone's data, models and plans.

    Raises ShardCoreError if git fails, or the folder is something else.
    """
    commit = git("rev-parse", "HEAD", cwd=source)
    if not folder.exists():
        # Renamed once it is whole: a clone that was killed has no files.
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        git("clone", "--quiet", "--shared", ".", str(part), cwd=source)
        part.rename(folder)
        # Without it, the clone would compile the searches for a quarter of a minute.
        copy_compiled_code(source / "shardcore", folder / "shardcore")
    elif not (folder / ".git").exists():
        raise ShardCoreError(f"{folder} is not a clone for the demo; remove it")
    elif git("rev-parse", "HEAD", cwd=folder) != commit:
        # Parameters and dvc.lock of the last demo are replaced.
        git("fetch", "--quiet", "origin", "HEAD", cwd=folder)
        git("checkout", "--quiet", "--force", "--detach", commit, cwd=folder)


def main() -> None:
    try:
        clone(Path.cwd(), Path.cwd() / FOLDER)
    except ShardCoreError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
