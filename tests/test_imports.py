"""The house's import directions, and that every DVC stage depends on the code, the data and the parameters of
its flow."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from shardcore.core.extras import RECIPES
from tasks import params, paths

ROOT = Path(__file__).parent.parent
OURS = ("shardcore", "tasks", "flows")
ORCHESTRATORS = {"prefect", "ray", "mlflow", "dvc"}


FLOORS = (
    ("core",),
    ("step",),
    ("io", "tables"),
    ("measure", "cost"),
    ("search",),
    ("plans",),
    ("torchrec",),
    ("report",),
    ("stages",),
    ("cli", "testing"),
)
"""The rooms of shardcore/, from the ground up."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, packages of `from a import b` resolved to a.b where that is a
    module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if node.module.split(".")[0] in OURS and module_file(whole) else node.module)
    return found


def our_files() -> list[Path]:
    return sorted(p for package in OURS for p in (ROOT / package).rglob("*.py"))


@cache
def imported_late(path: Path) -> set[str]:
    """Modules that a file names in a string, and imports when it first needs them."""
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"shardcore(\.\w+)+", node.value)
        and module_file(node.value)
    }


@cache
def reached(start: Path) -> set[Path]:
    """Files of ours that a file reaches through imports, packages' __init__ included (shardcore's own imports
    lazily: it counts, but is not followed)."""
    seen, waiting = set(), [start]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path == ROOT / "shardcore/__init__.py":
            continue
        for name in imports(path) | imported_late(path):
            parts = name.split(".")
            if parts[0] in OURS:
                waiting += [f for i in range(1, len(parts) + 1) if (f := module_file(".".join(parts[:i])))]
    return seen


@pytest.mark.parametrize("path", our_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_directions(path):
    place = path.relative_to(ROOT)
    tops = {n.split(".")[0] for n in imports(path)}
    ours = {n for n in imports(path) if n.split(".")[0] in OURS}
    if place.parts[0] == "shardcore":
        assert not tops & (ORCHESTRATORS | {"tasks", "flows"})
    if place.parts[0] == "tasks":
        assert "flows" not in tops
    if place.parts[:2] == ("shardcore", "search"):
        assert not any(n.startswith("shardcore.cost") and n != "shardcore.cost.model" for n in ours)
    if place.parts[0] == "flows" and place.name not in ("__init__.py",):
        assert not any(n.startswith("shardcore.cli") for n in ours)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "shardcore").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_room_sees_the_rooms_of_lower_floors_only(path):
    room, *inner = path.relative_to(ROOT / "shardcore").parts
    if not inner:
        assert room in ("__init__.py", "__main__.py"), f"{path} is in no room"
        return
    seen = {(name.split(".")[1], name) for name in imports(path) if name.startswith("shardcore.")}
    above = sorted(name for other, name in seen if other != room and FLOOR[other] >= FLOOR[room])
    assert not above, f"{room} is on floor {FLOOR[room] + 1} and sees {above}"


# --- what the stages of dvc.yaml depend on ------------------------------------------------------------------

STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
each_stage = pytest.mark.parametrize("stage", STAGES)


def listed(stage: str, *kinds: str) -> dict[str, dict]:
    """Paths of a stage's deps, outs, metrics or plots, and their options."""
    entries = [e for kind in kinds for e in STAGES[stage].get(kind, ())]
    return dict(next(iter(e.items())) if isinstance(e, dict) else (e, {}) for e in entries)


def made(stage: str) -> dict[str, dict]:
    return listed(stage, "outs", "metrics", "plots")


def is_within(path: str | Path, folders) -> bool:
    return any(Path(folder) in (Path(path), *Path(path).parents) for folder in folders)


@cache
def trees(stage: str) -> list[ast.AST]:
    """Syntax trees of the flow and of the tasks that it reaches."""
    files = (
        p
        for p in reached(ROOT / f"flows/{stage}.py")
        if p.parent.name in ("flows", "tasks") and p.name != "paths.py"
    )
    return [ast.parse(p.read_text()) for p in files]


def sections_read(stage: str) -> set[str]:
    """First arguments of params.read_section(...)."""
    return {
        node.args[0].value
        for tree in trees(stage)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "params.read_section"
    }


def data_named(stage: str) -> set[Path]:
    """The places paths.NAME that are data; datasets too, where a task reads which of them a model was trained
    on."""
    nodes = [node for tree in trees(stage) for node in ast.walk(tree)]
    names = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "paths"
    }
    places = {getattr(paths, name) for name in names}
    found = {place for place in places if isinstance(place, Path)} - {paths.PARAMS, paths.PROBLEMS}
    joined = any(isinstance(node, ast.Constant) and node.value == "datasets" for node in nodes)
    return found | ({paths.DATASETS} if joined else set())


@each_stage
def test_dvc_stage_depends_on_the_code_it_reaches(stage):
    deps, code = listed(stage, "deps"), reached(ROOT / f"flows/{stage}.py")
    missing = {p.relative_to(ROOT) for p in code if not is_within(p.relative_to(ROOT), deps)}
    assert not missing, f"stage {stage} reaches {sorted(map(str, missing))}, which dvc.yaml does not list"
    beyond = {d for d in deps if d.endswith(".py") and ROOT / d not in code}
    assert not beyond, f"stage {stage} does not reach {sorted(beyond)}, which dvc.yaml lists"


def test_measuring_goes_stale_with_no_cost_model_and_no_search():
    code = reached(ROOT / "flows/measure.py")
    assert not [p for p in code if is_within(p.relative_to(ROOT), ("shardcore/cost", "shardcore/search"))]


@each_stage
def test_dvc_stage_depends_on_the_sections_of_params_that_it_reads(stage):
    read = sections_read(stage)
    assert stage in read and read <= set(params.SECTIONS)
    assert set(STAGES[stage]["params"]) == read and STAGES[stage]["cmd"] == f"python -m flows.{stage}"


@each_stage
def test_dvc_stage_depends_on_the_data_that_it_names_or_makes_it(stage):
    deps, outs, named = listed(stage, "deps"), made(stage), data_named(stage)
    for place in named:
        assert is_within(place, {**deps, **outs}) or any(is_within(out, [place]) for out in outs), (
            f"stage {stage} reads {place}, which dvc.yaml lists neither among its deps nor its outs"
        )
    before = [out for other in list(STAGES)[: list(STAGES).index(stage)] for out in made(other)]
    data = [d for d in deps if d.startswith("data/")]
    assert set(data) <= set(before), f"stage {stage} reads what no stage before it makes"
    assert {str(p) for p in named} >= set(data)


def test_stages_make_what_the_project_keeps_and_dvc_leaves_what_grows():
    files = {stage: set(made(stage)) for stage in STAGES}
    assert files == {
        "tables": {"data/pool.json"},
        "measure": {"data/measurements"},
        "train": {"data/model", "data/card.md", "data/curves.csv"},
        "train_policy": {"data/policy"},
        "evaluate": {
            f"data/evaluation/{n}"
            for n in (
                "figures.json",
                "predictions.png",
                "replays",
                "metrics.json",
                "predictions.csv",
                "sharders.csv",
            )
        },
    }
    growing = {out for stage in STAGES for out, options in made(stage).items() if options.get("persist")}
    assert growing == {"data/measurements", "data/evaluation/replays"}


def test_stages_that_read_lists_of_public_tables_depend_on_them():
    for stage in STAGES:
        code = reached(ROOT / f"flows/{stage}.py")
        if {ROOT / f"shardcore/tables/{name}.py" for name in ("public", "statistics")} & code:
            assert "shardcore/tables" in listed(stage, "deps")  # the folder holds the lists


def test_shardcore_uses_only_the_core_and_packages_whose_extra_it_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    extras = re.findall(r"shardcore\[(.*?)\]", " ".join(RECIPES.values()))
    named = {name for names in extras for name in names.split(",")}
    assert named <= set(project["optional-dependencies"])
    for path in sorted((ROOT / "shardcore").rglob("*.py")):
        used = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
        beyond = used - core - {"shardcore", "_typeshed", *RECIPES}  # type checkers bring _typeshed
        assert not beyond, f"{path} imports {beyond}, which neither the core nor an extra installs"


@cache
def imported_at_import(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_orchestrators_fbgemm_and_what_is_seldom_needed_are_imported_late():
    heavy = ORCHESTRATORS | {"fbgemm_gpu", "torchrec", "scipy", "matplotlib", "yaml", "safetensors"}
    for path in sorted((ROOT / "shardcore").rglob("*.py")):
        at_import = {name.split(".")[0] for name in imported_at_import(path)}
        assert not at_import & heavy, f"{path} imports {at_import & heavy} at import"


def test_planning_imports_no_package_of_an_extra():
    starts = (
        *("cli", "cli.plans", "cli.decisions", "cli.problems", "cli.profiles", "cli.published", "cli.job"),
        *("search", "cost.composite", "plans.store", "plans.diff", "report.plan_report", "testing"),
    )
    waiting, seen = [f"shardcore.{start}" for start in starts], set()
    while waiting:
        path = module_file(waiting.pop())
        if path is None or path in seen:
            continue
        seen.add(path)
        names = imported_at_import(path)
        assert not {name.split(".")[0] for name in names} & set(RECIPES), path
        waiting += [name for name in names if name.startswith("shardcore.")]
    assert len(seen) > 50


def test_what_measures_on_the_cluster_reaches_no_prefect():
    """Each actor is a process that imports its class's module: Prefect would cost it a second."""
    modules = {path for path in our_files() if "\n@remote(" in path.read_text()}
    assert modules == {ROOT / "tasks/ray_transport.py"}
    for path in {reach for module in modules for reach in reached(module)}:
        assert not {name.split(".")[0] for name in imports(path)} & {"prefect", "mlflow", "dvc"}, path
