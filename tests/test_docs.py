"""Code of the documentation runs as written, in a folder with the files that its pages speak of.

docs/tools/blocks.py finds it. Searches get few evaluations, as their plans are not judged here.
"""

import contextlib
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from laws import comm_samples, compute_samples, linear_law

import shardcore
from docs.tools import blocks, pictures, readme
from docs.tools.reference import RECORDS, commands, field_list, library, modules, parsers, schemas
from shardcore.cli import command_line_parser, main
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import fit, neural
from shardcore.cost.analytic import AnalyticModel
from shardcore.io.envelope import VERSIONS
from shardcore.search import Budget

ROOT = blocks.ROOT
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in blocks.pages()}
BATCH = yaml.safe_load((ROOT / "params.yaml").read_text())["setting"]["batch"]
RUN = {name: [b for b in blocks.blocks(text) if b.runs and not b.reason] for name, text in PAGES.items()}
PROBLEM = next(b.code for b in blocks.blocks(PAGES["docs/plan.md"]) if "shardcore/problem" in b.code)
OFFERS = next(b.code for b in blocks.blocks(PAGES["docs/plan_provision.md"]) if "shardcore/offers" in b.code)
QUICK = Budget(evals=200)
ROWWISE = Setting("gpu", 2048, optimizer="rowwise_adagrad")
TIMINGS = "op,time_us,B,T,E,D,L\n" + "".join(
    f"{op},{us},{batch},1,1000000,{dim},20\n"
    for op, us in (("fwd", 300), ("bwd", 700))
    for batch in (8192, 16384)
    for dim in (64, 128)
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder of what commands of the pages read. Its models are of the batch of params.yaml, and smaller ones."""
    folder = tmp_path_factory.mktemp("docs")
    setting = Setting("law", BATCH)
    samples = compute_samples(linear_law, 60, setting), comm_samples(20, setting=setting)
    made = fit.train(*samples, setting, fit.FitConfig(epochs=1)).model
    ranges = {**made.meta["ranges"], "batch": (BATCH // 8, BATCH)}
    for name in ("data/model", "model", "models/h100"):
        neural.save(replace(made, meta={**made.meta, "ranges": ranges}), folder / name)
    (folder / "offers.json").write_text(OFFERS)
    (folder / "p.json").write_text(PROBLEM)
    now = json.loads(PROBLEM)
    now["tables"][0]["rows"] *= 2
    (folder / "now.json").write_text(json.dumps(now))
    with contextlib.chdir(folder):
        assert main(shlex.split("plan p.json --model data/model --algorithm size_greedy --out old.json")) == 0
    (folder / "timings.csv").write_text(TIMINGS)
    return folder


@pytest.fixture
def folder(files, tmp_path, monkeypatch, capsys) -> Path:
    """A copy of these files. Searches in it are short."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardcore.search.budget.MOST_EVALS", QUICK.evals)
    monkeypatch.setattr(shardcore, "Budget", lambda **given: QUICK)
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize("page", [name for name, found in RUN.items() if found])
def test_code_of_a_page_runs(page, folder, capsys):
    names = {"__name__": "docs", "np": np, "shardcore": shardcore, **given(page)}
    for block in RUN[page]:
        Path("p.json").write_text(PROBLEM)  # the page's problem, whatever other blocks wrote
        for command in (re.sub(r"--budget-s \d+", "--budget-s 2", text) for text in block.commands):
            assert main(shlex.split(command)) == 0, (
                f"{page}:{block.line}: {command}\n{capsys.readouterr().err}"
            )
        if block.language == "python":
            # Errors then show the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)


def given(page: str) -> dict:
    """Names that a page's Python takes for granted."""
    if not page.startswith(("docs/plan", "docs/torchrec")):
        return {}
    pytest.importorskip("torchrec")
    import torch
    from planning import CONSTRAINTS, LOOKUPS, MODULE, planner
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    def make_model():
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=10**6, embedding_dim=64, feature_names=[n])
            for n in ("user", "item")
        ]
        return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)

    return {
        "module": MODULE,
        "topology": Topology(4, "cpu"),
        "global_batch": 2048,
        "batches": LOOKUPS,
        "lookups": LOOKUPS,
        "constraints": CONSTRAINTS,
        "ParameterConstraints": ParameterConstraints,
        "EmbeddingShardingPlanner": EmbeddingShardingPlanner,
        "make_model": make_model,
        "sharding_plan": planner().plan(MODULE),
        "ids": np.arange(4096) % 999,
        "rows": 5000,
        "model": shardcore.load_model("model") if page.startswith("docs/plan") else AnalyticModel(ROWWISE),
    }


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_and_their_options_exist(page):
    found = list(blocks.blocks(PAGES[page]))
    used = [c for b in found for c in b.commands] + blocks.inline_commands(PAGES[page])
    parser_of = dict(parsers(command_line_parser()))
    for command in used:
        [*_, name] = sorted((n for n in parser_of if f"{command} ".startswith(f"{n} ")), key=len)
        known = {option for action in parser_of[name]._actions for option in action.option_strings}
        assert not set(re.findall(r"(?<!\S)(--[a-z-]+)", command)) - known, f"{page}: shardcore {command}"


def test_most_code_runs_and_the_rest_has_a_reason():
    all_blocks = [b for text in PAGES.values() for b in blocks.blocks(text) if b.runs]
    assert sum(not b.reason for b in all_blocks) >= 20
    marks = sum(text.count("<!-- not run:") for text in PAGES.values())
    assert marks == sum(bool(b.reason) for b in all_blocks), "a mark is before no block of code"


def test_a_block_has_its_line_its_reason_and_commands_without_comments():
    text = "a\n\n<!-- not run: on a cluster -->\n```\nshardcore plan p.json \\\n  --seed 3  # why\nls\n```\n"
    text += "\n```python\nx\n```\n"
    first, second = blocks.blocks(text)
    assert (first.line, first.reason, first.commands) == (5, "on a cluster", ["plan p.json --seed 3"])
    assert (second.line, second.reason, second.runs) == (11, "", True)
    assert blocks.inline_commands("`shardcore plan\n -h` and `python -m shardcore heat p.json`") == [
        "plan -h",
        "heat p.json",
    ]


def test_each_schema_has_its_records_and_each_field_its_meaning():
    assert set(RECORDS) == set(VERSIONS)
    page = schemas()
    assert all(f"## shardcore/{name}" in page for name in VERSIONS)
    assert "| `pooling` | `float` |  | mean lookups per sample" in page


def test_the_reference_names_each_command_and_all_that_the_library_offers():
    page = commands()
    assert all(f"## shardcore {name}\n" in page for name, _ in parsers(command_line_parser()))
    assert "| `--budget-s BUDGET_S` |  | seconds for all searches together |" in page
    assert library().count("\n::: shardcore.") == len(shardcore.__all__)
    assert "::: shardcore.torchrec.planner" in modules()


def test_fields_of_a_docstring_become_a_list():
    text = "A step.\n\nrows: ids that\n    it has.\na, b: two.\n\nMore."
    assert field_list(text) == "A step.\n\n- `rows`: ids that it has.\n- `a`, `b`: two.\n\nMore."


def sentences(text: str) -> list[str]:
    """Sentences of a page's prose: no code blocks, tables and headings. A link counts as its words."""
    prose = blocks.FENCED.sub("", text)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith(("#", "|", "![")))
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    # What a list has in each item is a sentence, or several.
    blocks_of = re.split(r"\n\s*\n|^- ", prose, flags=re.M)
    return [s for block in blocks_of for s in re.split(r"(?<=[.!?])\s+", " ".join(block.split())) if s]


SHORT = (
    "README.md",
    *(f"docs/{n}.md" for n in ("how_it_works", "neuroshard", "tutorial_torchrec", "tutorial_pipeline")),
)


@pytest.mark.parametrize("page", SHORT)
def test_sentences_are_short(page):
    long = [s for s in sentences(PAGES[page]) if len(s.split()) > 20]
    assert not long, long


def test_sentences_are_told_apart():
    text = "# A title\n\nOne two. [Three](x.md) four: five\n\n- six\n- seven\n\n```\ncode\n```\n| a |\n"
    assert sentences(text) == ["One two.", "Three four: five", "six", "seven"]


def test_a_picture_says_what_travels_under_each_kind():
    words = [text.get_text() for axes in pictures.kinds().axes for text in axes.texts]
    # 32,768 samples of 128 FP32 columns are 16.8 MB: of a whole table from one device, cut in four from each.
    assert words.count("all-to-all: 17 MB") == 1
    assert words.count("all-to-all: 4 MB") == 1
    assert "reduce-scatter in a host: 17 MB" in words and "all-reduce: 5,120 MB" in words


@pytest.mark.parametrize("page", PAGES)
def test_pictures_of_a_page_exist(page):
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGES[page]):
        assert ((ROOT / page).parent / path).is_file(), f"{page} shows {path}, which is not there"


# --- links ----------------------------------------------------------------------------------------------------

ALL = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
ALL += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md"), *ROOT.glob("datasets/*/README.md")]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    prose = blocks.FENCED.sub("", text)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(re.sub(r"`[^`\n]+`", "", blocks.FENCED.sub("", page.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        has_anchor = not anchor or (found.suffix == ".md" and anchor in anchors(found.read_text()))
        if not found.exists() or not has_anchor:
            broken.append(target)
    assert not broken


def test_readme_has_the_figures_of_the_page_that_it_names():
    text = (ROOT / "README.md").read_text()
    assert readme.filled(text) == text
    assert readme.filled(text.replace("1.043", "1.000")) == text


def test_a_page_without_a_figure_is_refused():
    with pytest.raises(ShardCoreError, match="the page has no 'predicted' of \"NeuroShard's search\""):
        readme.table("| plans of | predicted |\n|---|---|\n| random | 2 |\n")
    with pytest.raises(ShardCoreError, match="has no block"):
        readme.filled("# ShardCore\n")
