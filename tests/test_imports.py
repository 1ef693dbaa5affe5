"""The house's import directions, and that every DVC stage depends on the code that its flow reaches."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
OURS = ("shardcore", "tasks", "flows")
ORCHESTRATORS = {"prefect", "ray", "mlflow", "dvc"}


def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, packages of `from a import b` resolved to a.b where that is a module."""
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


def reached(start: Path) -> set[Path]:
    """Files of ours that a file reaches through imports, packages' __init__ included (shardcore's own imports lazily: it
    counts, but is not followed)."""
    seen, waiting = set(), [start]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path == ROOT / "shardcore/__init__.py":
            continue
        for name in imports(path):
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
    if place == Path("shardcore/types.py"):
        assert not ours
    if place.parts[:2] == ("shardcore", "measure"):
        assert not any(n.startswith(("shardcore.cost", "shardcore.search")) for n in ours)
    if place.parts[:2] == ("shardcore", "search"):
        assert not any(n.startswith("shardcore.cost") and n != "shardcore.cost.model" for n in ours)
    if place.parts[0] == "flows" and place.name not in ("__init__.py",):
        assert not any(n.startswith(("shardcore.measure", "shardcore.search")) for n in ours)


@pytest.mark.parametrize("stage", ["tables", "measure", "train", "evaluate"])
def test_dvc_stage_depends_on_the_code_it_reaches(stage):
    deps = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    covered = [ROOT / d for d in deps]
    missing = {p.relative_to(ROOT) for p in reached(ROOT / f"flows/{stage}.py")
               if not any(p == c or c in p.parents for c in covered)}
    assert not missing, f"stage {stage} reaches {sorted(map(str, missing))}, which dvc.yaml does not list"


def test_planning_and_pricing_start_without_torch():
    code = "import sys, shardcore.plan_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_shardcore_runs_without_orchestrators_and_fbgemm_is_late():
    heavy = ORCHESTRATORS | {"fbgemm_gpu", "torchrec", "scipy", "matplotlib", "yaml", "safetensors"}
    for path in sorted((ROOT / "shardcore").rglob("*.py")):
        at_import = {a.split(".")[0] for node in ast.parse(path.read_text()).body for a in
                     ([x.name for x in node.names] if isinstance(node, ast.Import) else
                      [node.module] if isinstance(node, ast.ImportFrom) else [])}
        assert not at_import & heavy, f"{path} imports {at_import & heavy} at import"
