"""Code blocks of the documentation: what runs, and what does not, with the reason.

    python -m docs.tools.blocks            blocks that are not run, and why

Python blocks run in their order, in one namespace a page. Of other blocks, lines that start `shardcore` run.
tests/test_docs.py runs them. A comment before a block says why it is not run:

    <!-- not run: in a training job -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"^(?: *<!-- not run: (?P<reason>.+?) -->\n+)?(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$",
    re.S | re.M,
)
FENCED = re.compile(r"(^ *```.*?^ *```$\n?)", re.S | re.M)
"""A block of code with its fences, as a group: re.split gives text and blocks in turn."""
_COMMAND = re.compile(r"^(?:sudo )?(?:(?:python |torchrun .*)-m )?shardcore (.+)$")
_INLINE = re.compile(r"`(?:python -m )?shardcore ([a-z][^`]*)`")


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    line: number of its first line of code in the page.
    reason: why it is not run. "": it is.
    """

    line: int
    language: str
    code: str
    reason: str = ""

    @property
    def commands(self) -> list[str]:
        """Arguments of each command `shardcore`, without comments. Those of several lines are one."""
        if self.language not in ("", "bash"):
            return []
        whole = re.sub(r" *\\\n *", " ", self.code)
        matches = (_COMMAND.match(line.strip()) for line in whole.splitlines())
        return [re.sub(r"(^| +)#.*", "", match[1]).strip() for match in matches if match]

    @property
    def runs(self) -> bool:
        """Tell if there is code in it that can run."""
        return self.language == "python" or bool(self.commands)


def pages() -> list[Path]:
    """The pages for users. Reports of benchmarks and decisions are of their commits."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]


def blocks(text: str) -> Iterator[Block]:
    """Blocks of a page, in their order."""
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(line, match["language"], dedent(match["code"]), match["reason"] or "")


def inline_commands(text: str) -> list[str]:
    """Arguments of commands within sentences."""
    return [" ".join(matches.split()) for matches in _INLINE.findall(_BLOCK.sub("", text))]


def main() -> None:
    for page in pages():
        for block in blocks(page.read_text()):
            if block.reason:
                first = block.code.splitlines()[0]
                print(f"not run: {page.relative_to(ROOT)}:{block.line}: {block.reason}: {first[:60]}")


if __name__ == "__main__":
    main()
