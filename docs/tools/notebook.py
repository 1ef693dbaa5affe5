"""Run a notebook's cells, and keep what they show. Markdown of it, for the site.

    python -m docs.tools.notebook examples/first_plan.ipynb

A cell shows what it prints, and the value of its last line: as text, and as the HTML or PNG that it offers.
Jupyter shows the same. It is not needed here.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from shardcore.io.writing import write_atomic


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        made = executed(json.loads(path.read_text()))
        write_atomic(path, (json.dumps(made, indent=1, ensure_ascii=False) + "\n").encode())


def executed(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of a run, in a namespace of its own. A cell's error is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = _outputs("".join(cell["source"]), names, count)
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Outputs of a cell, in the notebook's format."""
    body = ast.parse(source, f"cell {count}").body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"cell {count}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    text = printed.getvalue()
    outputs: list[dict[str, Any]] = (
        [{"output_type": "stream", "name": "stdout", "text": _lines(text)}] if text else []
    )
    if value is not None:
        shown = {
            "output_type": "execute_result",
            "execution_count": count,
            "metadata": {},
            "data": _data(value),
        }
        outputs.append(shown)
    return outputs


def _data(value: Any) -> dict[str, Any]:
    """Forms of a value, by MIME type."""
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = _lines(value._repr_html_())
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def markdown(notebook: Mapping[str, Any]) -> str:
    """The notebook as Markdown: code as blocks, and what it showed below."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell))


def _parts(cell: Mapping[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            parts.append(f'<img alt="bars of each device" src="data:image/png;base64,{data["image/png"]}">')
        elif "text/html" in data:
            # Without empty lines, which would end the HTML.
            parts.append(f"<div>{''.join(data['text/html'])}</div>".replace("\n", ""))
        else:
            text = "".join(output.get("text") or data["text/plain"])
            parts.append(f"```text\n{text.rstrip()}\n```")
    return parts


if __name__ == "__main__":
    main()
