"""Hooks of mkdocs: pages that come from elsewhere in the repository, and links to them.

Pages of docs/ are written for a reader of the repository. The site takes them as they are: a link to a file of the
repository becomes one to its page of the site, and one that leads nowhere fails the build.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs runs hooks by their path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from docs.tools import reference
from docs.tools.blocks import FENCED, ROOT
from docs.tools.notebook import markdown

SOURCES = {
    "index.md": "README.md",
    "code.md": "docs/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "examples/first_plan.md": "examples/first_plan.ipynb",
    "examples/torchrec_dlrm.md": "examples/torchrec_dlrm/README.md",
    "examples/torchrec_dlrmv3.md": "examples/torchrec_dlrmv3/README.md",
    "datasets/cpu-amd-epyc.md": "datasets/cpu-amd-epyc/README.md",
    "datasets/emulated-hosts.md": "bench/emulated-hosts/README.md",
}
"""Files of the repository that are pages of the site, by their address there."""
_ADDRESS = {source: page for page, source in SOURCES.items()}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made, and those of other folders."""
    files.remove(files.get_file_from_path("README.md"))  # code.md has it: a README would be the home page
    made = {page: _text(ROOT / source) for page, source in SOURCES.items()} | reference.pages()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """The page with links of the site, and with lists as Markdown of Python takes them."""
    address = page.file.src_uri
    source = SOURCES.get(address, f"docs/{address}")
    outside = [
        _lists(_linked(part, source, address)) if i % 2 == 0 else part
        for i, part in enumerate(FENCED.split(text))
    ]
    return "".join(outside)


def on_post_build(config: Any) -> None:
    """Refuse a site that would load anything from elsewhere."""
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\s\"'>]+")
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        loaded = [m for m in loads.findall(path.read_text()) if 'rel="canonical"' not in m]
        if loaded:
            raise PluginError(f"{path.relative_to(config.site_dir)} loads from elsewhere: {loaded[0]}")


def _text(path: Path) -> str:
    text = path.read_text()
    return markdown(json.loads(text)) if path.suffix == ".ipynb" else text


def _linked(text: str, source: str, address: str) -> str:
    """Text whose links to files of the repository lead to pages of the site.

    source: the page's file in the repository.
    address: its address in the site.
    """

    def replaced(match: re.Match) -> str:
        label, target = match.groups()
        if re.match(r"[a-z]+:|#", target) or source.startswith("docs/reference/"):
            return match[0]
        path, mark, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        for name in (file, f"{file}/README.md"):
            if name in _ADDRESS:
                file = _ADDRESS[name]
                break
        else:
            if not (ROOT / file).exists() or not file.startswith("docs/"):
                raise PluginError(f"{source} links to {target}, which is no page of the site")
            file = file.removeprefix("docs/")
            if (ROOT / "docs" / file).is_dir():
                file += "/README.md"
        return f"{label}({posixpath.relpath(file, posixpath.dirname(address) or '.')}{mark}{anchor})"

    return _LINK.sub(replaced, text)


def _lists(text: str) -> str:
    """Text with an empty line before each list, and four spaces before what belongs to an item."""
    lines, in_list = [], False
    for line in text.splitlines(keepends=True):
        stripped = line.lstrip(" ")
        indent = len(line) - len(stripped)
        if _ITEM.match(stripped) and (indent == 0 or in_list):
            if not in_list and lines and lines[-1].strip():
                lines.append("\n")
            in_list = True
        elif stripped.strip() and indent == 0 and (not lines or not lines[-1].strip()):
            in_list = False
        lines.append(
            " " * 4 * -(-indent // 4) + stripped if in_list and indent and stripped.strip() else line
        )
    return "".join(lines)
