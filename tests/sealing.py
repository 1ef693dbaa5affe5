"""Documents edited, and their digests made right again, for these are no secret."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardcore.io import files

HEAD = ("schema", "version", "digest")


def sealed(value: dict[str, Any], without: Sequence[str] = HEAD) -> dict[str, Any]:
    return {**value, "digest": files.json_digest({k: v for k, v in value.items() if k not in without})}


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a file's document in place."""
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(sealed(value)))
