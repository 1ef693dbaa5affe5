"""The site takes pages of the repository as they are: links lead to pages of the site, and lists are seen as such."""

import re

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs installs it")

from mkdocs.exceptions import PluginError

from docs.tools import site
from docs.tools.blocks import FENCED


@pytest.mark.parametrize(
    "link, source, address, expected",
    [
        ("[a](docs/plan.md#search)", "README.md", "index.md", "[a](plan.md#search)"),
        ("[a](examples/torchrec_dlrm)", "README.md", "index.md", "[a](examples/torchrec_dlrm.md)"),
        ("![a](docs/pictures/step.svg)", "README.md", "index.md", "![a](pictures/step.svg)"),
        ("[a](../README.md)", "docs/README.md", "code.md", "[a](index.md)"),
        (
            "[a](../decisions/search.md)",
            "docs/benchmarks/x.md",
            "benchmarks/x.md",
            "[a](../decisions/search.md)",
        ),
        ("[a](../docs/plan.md)", "examples/first_plan.ipynb", "examples/first_plan.md", "[a](../plan.md)"),
        ("[a](https://a.example), [b](#here)", "README.md", "index.md", "[a](https://a.example), [b](#here)"),
    ],
)
def test_links_lead_to_pages_of_the_site(link, source, address, expected):
    assert site._linked(link, source, address) == expected


@pytest.mark.parametrize("target", ["docs/gone.md", "shardcore/__init__.py"])
def test_a_link_to_what_is_no_page_fails_the_build(target):
    with pytest.raises(
        PluginError, match=re.escape(f"README.md links to {target}, which is no page of the site")
    ):
        site._linked(f"[a]({target})", "README.md", "index.md")


def test_lists_get_the_form_that_the_site_reads():
    text = "Words:\n- one\n  goes on\n- two\n\n  | a |\n\nMore.\n"
    assert site._lists(text) == "Words:\n\n- one\n    goes on\n- two\n\n    | a |\n\nMore.\n"


def test_code_is_told_from_text():
    text = "a\n\n```python\n- b\n```\nc\n"
    assert FENCED.split(text) == ["a\n\n", "```python\n- b\n```\n", "c\n"]


@pytest.mark.parametrize(
    "page, refused",
    [
        ('<script src="https://a.example/x.js">', True),
        ('<link rel="stylesheet" href="//a.example/x.css">', True),
        ('<script src="assets/x.js"></script> <a href="https://a.example">', False),
    ],
)
def test_a_site_that_loads_from_elsewhere_is_refused(page, refused, tmp_path):
    (tmp_path / "index.html").write_text(page)
    config = type("Config", (), {"site_dir": str(tmp_path)})
    if refused:
        with pytest.raises(PluginError, match=r"index.html loads from elsewhere"):
            site.on_post_build(config)
    else:
        site.on_post_build(config)
