"""Draw functions and docstrings for a reader who judges whether they are understood without context.

    python -m docs.tools.draw_names --seed 1 > drawn.txt

The sheet shows functions by module, name and signature, and docstrings by module, name and first paragraph. The reader
sees nothing else. docs/decisions/names.md has what readers said.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("shardcore", "tasks", "flows", "bench")


def named_nodes(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Classes of a node with its functions and methods, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}{child.name}", child
        if isinstance(child, ast.ClassDef):
            yield from named_nodes(child, f"{prefix}{child.name}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--number", type=int, default=60, help="of functions, and of docstrings (60)")
    args = parser.parse_args()
    functions, docstrings = [], []
    for path in sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        module, tree = ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())
        for name, node in [("(module)", tree), *named_nodes(tree)]:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                functions.append((module, name, f"def {node.name}({ast.unparse(node.args)}){returns}"))
            if text := ast.get_docstring(node):
                docstrings.append((module, name, text.partition("\n\n")[0]))
    rng = random.Random(args.seed)
    for head, letter, all_of_them in (("Functions", "F", functions), ("Docstrings", "D", docstrings)):
        print(f"\n## {head}: {args.number} of {len(all_of_them)}")
        for i, (module, name, text) in enumerate(rng.sample(all_of_them, args.number), 1):
            print(f"\n{letter}{i}. module {module}, `{name}`\n{text}")


if __name__ == "__main__":
    main()
