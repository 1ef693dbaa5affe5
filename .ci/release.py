"""Build the sdist and the wheel of the last commit into dist/, and check both in a bare environment.

    python .ci/release.py                                  `make release`: at the locked versions
    python .ci/release.py --resolution lowest-direct       `make minimum`: at the lowest that pyproject.toml allows

The wheel is built from the sdist. A throw-away environment gets nothing but the wheel and what it requires. There the
command plans under a hardware profile, as a reader of README's first minute does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

import install  # noqa: E402

UV = (sys.executable, "-m", "uv")
LOCKED, LOWEST = "highest", "lowest-direct"
FIRST_MINUTE = (
    "shardcore -h",
    "shardcore profile list",
    "shardcore problem mlperf-dlrm-dcnv2 --devices 8 --batch 65536 --out p.json",
    "shardcore plan p.json --hardware nvidia-h100-sxm --budget-evals 500 --out plan.json",
    "shardcore plan p.json --hardware nvidia-h100-sxm --algorithm random --out random.json",
    "shardcore price plan.json --problem p.json --hardware nvidia-h100-sxm",
    "shardcore diff random.json plan.json --problem p.json",
)
"""Commands that a bare installation has to run, in an empty folder."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python .ci/release.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--resolution", choices=(LOCKED, LOWEST), default=LOCKED)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        scratch = Path(name)
        source = committed(scratch / "source")
        made = build(source, scratch / "dist")
        print(f"built {' and '.join(path.name for path in made)}", flush=True)
        print(described(made), flush=True)
        python = environment(scratch / "env", made[1], args.resolution)
        print("\n".join(f"ok: {line}" for line in tried(python.parent, scratch / "empty")), flush=True)
        # Only what passed at the locked versions is left in dist/.
        if args.resolution == LOCKED:
            args.out.mkdir(parents=True, exist_ok=True)
            for path in made:
                shutil.copy2(path, args.out)
                print(args.out / path.name)


def committed(folder: Path) -> Path:
    """Files of the last commit, in a folder. A release has nothing that git does not know."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """The sdist of a folder, and the wheel of that sdist.

    The build backend is this environment's, so that building needs no index.
    """
    env = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}  # 1980, the first that a zip can have
    options = ("--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(out))
    _run([*UV, "build", *options, str(source)], env=env)
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def described(made: Sequence[Path]) -> str:
    """Result of twine's check of what an index shows, or the reason that there is none."""
    if importlib.util.find_spec("twine") is None:
        return "not checked by twine, which is not installed: pip install twine"
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)])
    return "ok: twine check --strict"


def environment(folder: Path, wheel: Path, resolution: str) -> Path:
    """Python of a new environment that has the wheel and what it requires, nothing else."""
    _run([*UV, "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder)])
    python = folder / "bin/python"
    versions = ["--resolution", resolution]
    # The lock would forbid the lowest versions.
    versions += ["--constraint", str(install.CONSTRAINTS)] if resolution == LOCKED else []
    options = [*versions, *install.uv_options(install.pip_settings())]
    # Named beside the wheel, as uv lowers only what it was asked for.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [str(wheel), *project["dependencies"]]
    _run([*UV, "pip", "install", "--quiet", "--python", str(python), *options, *wanted])
    listed = json.loads(_run([*UV, "pip", "list", "--quiet", "--format", "json", "--python", str(python)]))
    print(", ".join(f"{found['name']} {found['version']}" for found in listed), flush=True)
    return python


def tried(binaries: Path, folder: Path) -> list[str]:
    """Run the first minute's commands in an empty folder. Returns what ran. Exits where one fails."""
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    outputs = [
        _run([str(binaries / part[0]), *part[1:]], cwd=folder, env=env)
        for part in map(str.split, FIRST_MINUTE)
    ]
    if "not of your machine" not in outputs[3]:
        raise SystemExit(f"error: the plan does not say that a profile priced it:\n{outputs[3]}")
    version = _run(
        [str(binaries / "python"), "-c", "import shardcore; print(shardcore.__version__)"],
        cwd=folder,
        env=env,
    )
    source = (ROOT / "shardcore/__init__.py").read_text()
    if (wanted := re.search(r'__version__ = "(.+)"', source)) is None or version.strip() != wanted[1]:
        raise SystemExit(f"error: the wheel is of version {version.strip()}, the source of another")
    return [*FIRST_MINUTE, f"shardcore {version.strip()}"]


def _run(command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"error: {' '.join(command)} ended with code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
