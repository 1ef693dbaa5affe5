"""How long an installation takes, and how big it is: as before the lock, with pip and it, with uv and it.

    python -m bench.setup --out setup.json [--repeats 2] [--folder /tmp]

Each installation goes into a new environment, which is removed. "cold" begins with empty caches of pip and
uv, "warm" has those of the cold one before it. The arms take turns; a figure is the least of its repeats.

Packages that pip finds in local folders (`pip config list`) need no download: there cold differs only by what
uv unpacks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from shardcore.measure import hardware
from tasks.commit import git_commit

ROOT = Path(__file__).parent.parent
EXTRAS = ("cpu", "pipeline", "dev", "torchrec")
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--root-user-action", "ignore")
BEFORE = [[*PIP, "--editable", f"{ROOT}[{','.join(EXTRAS)}]"], [*PIP, "--no-deps", "torchrec==1.8.0"]]
INSTALL = str(ROOT / "install.py")
ARMS = {
    "pip, no lock (as before)": BEFORE,
    "pip and the lock": [[INSTALL, "--installer", "pip", *EXTRAS]],
    "uv and the lock (make setup)": [[INSTALL, *EXTRAS]],
    "uv, only the base (a planner's)": [[INSTALL]],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.setup", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file of the figures")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="of the environments and caches; 5 GB")
    args = parser.parse_args()
    runs = []
    for repeat in range(args.repeats):
        for arm, commands in ARMS.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                for cache in ("cold", "warm"):
                    runs.append(
                        {"arm": arm, "cache": cache, "repeat": repeat, **installed(Path(folder), commands)}
                    )
                    print(*runs[-1].values(), flush=True)
                    args.out.write_text(json.dumps(runs, indent=1))
    print(table(runs, args.repeats))


def installed(folder: Path, commands: list[list[str]]) -> dict[str, float]:
    """Seconds of an installation into a new environment, the environment included, and its gigabytes."""
    place = folder / "env"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PIP_CACHE_DIR": str(folder / "pip"), "UV_CACHE_DIR": str(folder / "uv")}
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    for command in commands:
        subprocess.run([place / "bin/python", *command], env=env, cwd=ROOT, check=True)
    seconds = time.monotonic() - began
    size = sum(p.lstat().st_size for p in place.rglob("*"))
    shutil.rmtree(place)
    return {"seconds": round(seconds, 1), "gigabytes": round(size / 1e9, 2)}


def table(runs: list[Mapping], repeats: int) -> str:
    """Markdown. The least of each arm's seconds, and against the first arm."""

    def least(arm: str, cache: str) -> float:
        return min(r["seconds"] for r in runs if (r["arm"], r["cache"]) == (arm, cache))

    first = next(iter(ARMS))
    rows = [
        f"{os.cpu_count()} cores of {hardware.hardware_name('cpu')}, commit {git_commit()}, "
        f"least of {repeats}",
        "",
        "| installation | cold, s | warm, s | cold against before | warm against before | GB |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        cold, warm = least(arm, "cold"), least(arm, "warm")
        size = max(r["gigabytes"] for r in runs if r["arm"] == arm)
        rows.append(
            f"| {arm} | {cold:.0f} | {warm:.0f} | {cold / least(first, 'cold'):.2f} "
            f"| {warm / least(first, 'warm'):.2f} | {size:.1f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
