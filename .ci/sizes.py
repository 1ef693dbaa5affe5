"""Fail where a room has more statements than its ceiling in pyproject.toml allows (`make lint`).

A statement is a node of Python's syntax tree, so layout and comments cost nothing. Docstrings are not counted.
`a, b = x, y` counts as two statements.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOMS = {"tasks": "tasks", "flows": "tasks", "bench": "bench"}
"""The room of each package. Those of shardcore are its folders."""


def statements(source: str) -> int:
    """Number of statements of Python source, docstrings excluded."""
    return sum(map(_weight, ast.walk(ast.parse(source))))


def _weight(node: ast.AST) -> int:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return 0  # a docstring
        case ast.Assign(targets=targets, value=ast.Tuple(elts=values)) if any(
            isinstance(target, ast.Tuple) for target in targets
        ):
            return len(values)
    return int(isinstance(node, ast.stmt))


def rooms(root: Path) -> Counter[str]:
    """Statements by room: "step" for shardcore/step. Modules of shardcore itself count as core."""
    counts: Counter[str] = Counter()
    for package in ("shardcore", *ROOMS):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).parts
            room = ROOMS.get(package) or (parts[1] if len(parts) > 2 else "core")
            counts[room] += statements(path.read_text())
    return counts


def main(root: Path) -> int:
    table = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["shardcore"]["statements"]
    counts, width = rooms(root), max(map(len, table))
    errors = [f"room {room!r} has no ceiling in pyproject.toml" for room in counts if room not in table]
    for room, ceiling in table.items():
        print(f"{room:{width}}  {counts[room]:6,} of {ceiling:6,} statements")
        if counts[room] > ceiling:
            errors.append(f"{room} has {counts[room]:,} statements; its ceiling is {ceiling:,}")
    print("\n".join(f"error: {error}" for error in errors) or "All rooms are under their ceilings.")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent.parent))
