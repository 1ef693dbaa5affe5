"""How ShardCore treats each field of TorchRec's planning records, on several versions of TorchRec.

    python -m bench.torchrec_fields [--versions 1.5.0 1.9.2]

For each version, pip puts TorchRec's wheel into a folder of its own under the user's cache. It runs
there with the torch and FBGEMM that are installed: planning runs no op, and CPU builds of other versions of
torch are not on PyPI. tests/torchrec/field_checks.py then sets each field to another value than its default,
plans with it, and checks its class. Prints a Markdown table. Exits 1 if a class is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
VERSIONS = ("1.5.0", "1.7.0", "1.8.0", "1.9.2")
CLASSES = ("honoured", "priced", "refused")


def installed(version: str) -> Path:
    """A folder with that TorchRec. Raises RuntimeError if it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardcore"
    folder = cache / f"torchrec-{version}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-compile",
                "--target",
                f"{made}/new",
                f"torchrec=={version}",
            ],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"torchrec {version} cannot be installed: {done.stdout.strip()[-300:]}")
        try:
            os.rename(f"{made}/new", folder)
        except OSError:  # another process made it meanwhile
            if not folder.exists():
                raise
    return folder


def classes(version: str) -> dict[str, dict[str, str]]:
    """{record: {field: class}} under a version; what is no class says what is wrong."""
    env = os.environ | {"PYTHONPATH": f"{installed(version)}{os.pathsep}{HERE}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/torchrec/field_checks.py"],
        cwd=HERE,
        env=env,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"torchrec {version}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def table(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """found: classes by version."""
    fields = list(
        dict.fromkeys(
            (record, field) for of in found.values() for record, names in of.items() for field in names
        )
    )
    lines = [f"| record | field | {' | '.join(found)} |", "|---" * (len(found) + 2) + "|"]
    return "\n".join(
        lines
        + [
            f"| {record} | `{field}` | "
            + " | ".join(of[record].get(field, "-") for of in found.values())
            + " |"
            for record, field in fields
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.torchrec_fields", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    args = parser.parse_args()
    found = {version: classes(version) for version in args.versions}
    print(table(found))
    if any(how not in CLASSES for of in found.values() for fields in of.values() for how in fields.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
