"""Installation of a checkout: locked versions, pip's settings given to uv, and installation without uv."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

import install  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)
ELSEWHERE = {"fbgemm-gpu", "psycopg2-binary", "s3fs", "shardcore"}
"""Packages that are not locked: a GPU's FBGEMM, PostgreSQL's driver, object stores, and this package's own extras."""


def requirements() -> list[Requirement]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_each_requirement_is_locked_at_a_version_that_it_allows():
    for needed in requirements():
        name = install.canonical(needed.name)
        if name not in ELSEWHERE:
            assert LOCKED[name] in needed.specifier, f"locked is {name} {LOCKED[name]}, not {needed}"
    assert LOCKED[install.TORCHREC] and LOCKED["uv"]


def test_the_lock_holds_names_and_versions_only():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[a-z0-9-]+==[\w.]+", line) for line in lines)
    assert "://" not in "".join(lines)


def test_a_lock_drops_local_versions_and_what_is_not_ours_to_lock():
    made = install.locked(
        [
            ("torch", "2.13.0+cpu"),
            ("ruamel.yaml", "0.19.1"),
            ("shardcore", "0.1.0"),
            ("pip", "26.0"),
            ("PyYAML", "6.0.3"),
        ]
    )
    assert made == "pyyaml==6.0.3\nruamel-yaml==0.19.1\ntorch==2.13.0\n"


def test_uv_is_told_the_settings_that_pip_takes(tmp_path):
    """Checked against a real pip: its environment wins over its file, and section `install` over the global one."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a.example/simple\nno-index = true\n"
        "find-links = /wheels\n[install]\nfind-links = /x /y\n"
        "trusted-host = b.example\n[freeze]\nall = 1\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env |= {
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "HOME": str(tmp_path),
        "PIP_INDEX_URL": "https://c.example/simple",
        "PIP_EXTRA_INDEX_URL": "file:///d/simple file:///e",
    }
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=env,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    options = install.uv_options(install.settings_of(listed))
    assert (
        options
        == (
            "--index-strategy unsafe-best-match --default-index https://c.example/simple --index "
            "file:///d/simple --index file:///e --find-links /x --find-links /y "
            "--allow-insecure-host b.example --no-index"
        ).split()
    )


def test_torchrec_comes_without_its_dependencies_and_only_when_asked():
    assert install.wanted(["measure", "dev"]) == [["--editable", f"{ROOT}[measure,dev]"]]
    assert install.wanted([]) == [["--editable", str(ROOT)]]
    assert install.wanted(["torchrec"])[1:] == [["--no-deps", "torchrec"]]


BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "shardcore-9.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("shardcore.py", "")
        info = "shardcore-9.0.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: shardcore\\nVersion: 9.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\n"
                       "Tag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
build_wheel = build_editable
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout that needs no index, and the Python of an environment of its own."""
    (tmp_path / "install.py").write_text((ROOT / "install.py").read_text())
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n'
        '[project]\nname = "shardcore"\nversion = "9.0"\n'
    )
    (tmp_path / "constraints.txt").write_text("uv==0.0.1.dev1\n")
    venv.create(tmp_path / "env", symlinks=True)
    # pip itself is this one's: making another takes seconds.
    env = {
        **os.environ,
        "PYTHONPATH": next(p for p in sys.path if p.endswith("site-packages")),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }
    command = [tmp_path / "env/bin/python", tmp_path / "install.py"]
    return lambda *arguments: subprocess.run(
        [*command, *arguments], env=env, text=True, capture_output=True, timeout=60
    )


@pytest.mark.long
def test_where_uv_cannot_be_had_pip_installs_and_says_why(checkout, tmp_path):
    done = checkout("--installer", "uv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("uv cannot install this, so pip does, which takes longer: ERROR: ")
    assert "Cannot install uv" in done.stdout
    assert list(tmp_path.glob("env/lib/python3*/site-packages/shardcore-9.0.dist-info"))


def test_what_neither_can_install_is_an_error(checkout, tmp_path):
    (tmp_path / "backend.py").write_text("raise OSError('no backend here')")
    done = checkout("--installer", "pip")
    assert done.returncode and "no backend here" in done.stderr


def test_make_installs_the_extras_of_stages_and_tests():
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup", "EXTRA=measure-gpu"],
        cwd=ROOT,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    assert "python install.py --installer uv measure-gpu pipeline dev torchrec" in said


# --- without the extra --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, first",
    [
        (["-m", "flows.refresh"], "error: "),
        (["-m", "tasks.services"], "error: "),
        (["-c", "import flows.measure"], "ImportError: "),
    ],
)
def test_without_the_pipeline_one_line_names_the_extra(tmp_path, arguments, first):
    (tmp_path / "ray").mkdir()  # which `import ray` would take for the package
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"{first}flows and tasks need prefect, ray, mlflow, dvc, not installed here: "
        "pip install 'shardcore[measure,pipeline]' (in a checkout: make setup)"
    )
    assert first != "error: " or done.stderr.count("\n") == 1
