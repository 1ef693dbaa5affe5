"""Write the comments of params.yaml from the declarations of its keys.

    python -m docs.tools.params          # a test fails where a comment is another

The help of a key stands once, in the docstring of its config. Its rule lists the allowed words. A file chooses keys and
values. A key whose value is not the default shows the default.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from docs.tools.blocks import ROOT
from docs.tools.reference import field_texts
from flows.refresh import SECTIONS
from shardcore.cli.options import Field, field_declarations
from shardcore.core.errors import ShardCoreError
from shardcore.io.writing import write_atomic
from tasks.stack_config import StackConfig

PARAMS = Path(ROOT, "params.yaml")
CONFIGS = {**SECTIONS, "stack": StackConfig}
"""Config of each section."""
WIDTH = 120
_KEY = re.compile(r"( *)(\w+):(?: +([^#\s].*?))?(?: +#.*)?$")


def commented(text: str) -> str:
    """A parameter file with its head, and the comment of each section and key as its declaration has it."""
    head, _, body = text.partition("\n\n")
    lines, configs = [head, ""], [("", None)]
    for line in body.splitlines():
        if not (found := _KEY.fullmatch(line)):
            lines += [line] if not line.strip() else []
            continue
        indent, key, value = found[1], found[2], found[3] or ""
        configs = configs[: len(indent) // 2 + 1]
        config = configs[-1][1]
        if not indent:
            configs.append((key, CONFIGS[key]))
            lines += _commented_line(f"{key}: {value}".rstrip(), _summary(CONFIGS[key]))
            continue
        if config is None or key not in field_declarations(config):
            raise ShardCoreError(f"params.yaml has a key {key!r} that no config has")
        field = field_declarations(config)[key]
        configs.append((key, field.kind))
        lines += _commented_line(f"{indent}{key}: {value}".rstrip(), key_text(config, field, value))
    return "\n".join(lines) + "\n"


def _summary(config: type) -> str:
    """The first line of a config's docstring."""
    return (inspect.getdoc(config) or "").partition("\n")[0].rstrip(".")


def key_text(config: type, field: Field, value: str) -> str:
    """Text of a key: its help, its allowed words, and its default where a file has another value."""
    text = re.sub(r"\bNone\b", "null", field_texts(config)[field.name]).rstrip(".")
    known = next((rule.known for rule in field.rules if rule.known), ())
    words = [f"one of {', '.join(map(str, known))}"] * bool(known)
    if value and "default:" not in text and yaml.safe_load(value) != _plain(field.default):
        words.append(f"default: {_yaml_text(field.default)}")
    return "; ".join([text, *words])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _yaml_text(value: Any) -> str:
    return yaml.safe_dump(_plain(value), default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _commented_line(line: str, text: str) -> list[str]:
    """A line with its comment: behind it if there is room, else above it."""
    if len(line) + len(text) + 3 <= WIDTH:
        return [f"{line} # {text}"]
    indent = " " * (len(line) - len(line.lstrip()))
    return [*textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "), line]


def main() -> None:
    write_atomic(PARAMS, commented(PARAMS.read_text()).encode())


if __name__ == "__main__":
    main()
