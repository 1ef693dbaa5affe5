"""Fill README's table of figures from the page of one run: one commit, one machine.

    python -m docs.tools.readme

After a new run of the benchmark, name its page in README's comment, and run this again.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.tools.blocks import ROOT
from shardcore.core.errors import ShardCoreError
from shardcore.io.writing import write_atomic
from shardcore.report.text import markdown_table

ROWS = {
    "NeuroShard's search (our implementation)": "NeuroShard's search",
    "TorchRec's planner, swept": "TorchRec's planner, swept",
    "best greedy": "best greedy",
    "random": "random",
}
"""Names of the page's rows, by README's."""
COLUMNS = {
    "predicted": "predicted",
    "replayed": "replayed",
    "TorchRec: embedding part": "embedding part in TorchRec",
    "TorchRec: whole step": "whole step in TorchRec",
}
"""Names of the page's columns, by README's. The first table of the page that has both row and column counts."""
_BLOCK = re.compile(
    r"(<!-- figures of (\S+), by docs/tools/readme.py -->\n)(.*?)(\n<!-- end of figures -->)", re.S
)


def filled(readme: str) -> str:
    """README with its table as the page that its comment names has the figures."""
    if not _BLOCK.search(readme):
        raise ShardCoreError("README.md has no block '<!-- figures of PAGE, by docs/tools/readme.py -->'")
    return _BLOCK.sub(lambda block: f"{block[1]}{table((ROOT / block[2]).read_text())}{block[4]}", readme)


def table(page: str) -> str:
    """README's table from a page's tables. Raises ShardCoreError for a figure that it lacks."""
    ours = ("**ShardCore** (`anneal_columns`)", *("1" for _ in COLUMNS))
    rows = [
        (name, *(_figure(page, row, column) for column in COLUMNS.values())) for name, row in ROWS.items()
    ]
    return markdown_table(("plans of", *COLUMNS), [ours, *rows])


def _figure(page: str, row: str, column: str) -> str:
    for lines in re.findall(r"(?:^\|.*\n)+", page, re.M):
        head, _, *rows = (
            [cell.strip(" *") for cell in line.strip("|\n").split("|")] for line in lines.splitlines()
        )
        if column in head:
            for cells in rows:
                if cells[0] == row:
                    return cells[head.index(column)]
    raise ShardCoreError(f"the page has no {column!r} of {row!r}")


def main() -> None:
    readme = Path(ROOT, "README.md")
    write_atomic(readme, filled(readme.read_text()).encode())


if __name__ == "__main__":
    main()
