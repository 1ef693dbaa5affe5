"""Install ShardCore from this folder, into the environment of the Python that runs this.

    python install.py [EXTRA ...]     for example: python install.py measure pipeline dev torchrec
    python install.py --lock          write the versions that are installed now to constraints.txt

Versions are those of constraints.txt. uv installs if it can be had and sees the packages, else pip. uv reads
no settings of pip, so it is told them. This file needs Python and pip only.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE / "constraints.txt"
NOT_LOCKED = {"shardcore", "pip"}
TORCHREC = "torchrec"
"""Installed without its dependencies: it names the CUDA FBGEMM, which would be installed over the CPU's."""
HEADER = """\
# The versions that ShardCore is tested with. `make setup` installs them.
# `make lock` writes this file from a working environment; by hand: python install.py --lock
"""
# By extra, what stages and what they start import. Importing it once compiles it, as pip and uv are told not
# to compile the rest.
PROGRAMS = {
    "pipeline": (
        "flows.refresh",
        "flows.measure",
        "flows.train",
        "flows.evaluate",
        "torch._dynamo",
        "dvc.commands.repro",
        "prefect.server.api.server",
    ),
    "measure": ("fbgemm_gpu",),
    "measure-gpu": ("fbgemm_gpu",),
    TORCHREC: ("torchrec.distributed",),
}
PIP = (sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check")
UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
"""Of pip's settings that hold addresses, what uv calls them."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python install.py", description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of pyproject.toml")
    parser.add_argument("--installer", choices=("uv", "pip"), default="uv", help="default: uv, else pip")
    parser.add_argument("--lock", action="store_true", help="write constraints.txt instead")
    args = parser.parse_args()
    if args.lock:
        CONSTRAINTS.write_text(HEADER + locked((d.metadata["Name"], d.version) for d in distributions()))
        return
    for what in wanted(args.extras):
        install(what, args.installer)
    if "pipeline" in args.extras:
        compile_programs([name for extra in args.extras for name in PROGRAMS.get(extra, ())])
        run_python("from tasks import services; services.make_empty_database()")


def wanted(extras: list[str]) -> list[list[str]]:
    """Arguments of each installation: ShardCore with the extras, and what must come without dependencies."""
    ours = [["--editable", f"{HERE}[{','.join(extras)}]" if extras else str(HERE)]]
    return ours + ([["--no-deps", TORCHREC]] if TORCHREC in extras else [])


def install(what: list[str], installer: str) -> None:
    """Install with uv, or with pip where uv cannot. Exits with pip's code if pip cannot either."""
    pinned = ["--constraint", str(CONSTRAINTS), *what]
    if installer == "uv":
        why = _uv(pinned)
        if not why:
            return
        print(f"uv cannot install this, so pip does, which takes longer: {why}", flush=True)
    done = subprocess.run(
        [*PIP, "install", "--progress-bar", "off", "--root-user-action", "ignore", "--no-compile", *pinned],
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def _uv(arguments: list[str]) -> str:
    """Install with uv. Returns "", or the first line of why not."""
    for command in (
        [*PIP, "install", "--constraint", str(CONSTRAINTS), "uv"],
        [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            sys.executable,
            *uv_options(pip_settings()),
            *arguments,
        ],
    ):
        done = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            said = [line for line in map(str.strip, done.stdout.splitlines()) if line]
            return " ".join(said[:2]) or f"exit code {done.returncode}"
    return ""


def pip_settings() -> dict[str, str]:
    """pip's settings for an installation, from its files and the environment."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return settings_of(done.stdout)


def settings_of(listed: str) -> dict[str, str]:
    """{name: value} of the lines of `pip config list`. pip's own order: the environment before its files."""
    found = [re.fullmatch(r"(global|install|:env:)\.([\w-]+)=(.*)", line) for line in listed.splitlines()]
    return {
        m[2]: ast.literal_eval(m[3])
        for section in ("global", "install", ":env:")
        for m in found
        if m and m[1] == section
    }


def uv_options(settings: Mapping[str, str]) -> list[str]:
    """pip's settings as options of uv. Like pip, it then takes the best version of all indexes."""
    options = [
        part
        for name, option in UV_OPTIONS.items()
        for value in settings.get(name, "").split()
        for part in (option, value)
    ]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return ["--index-strategy", "unsafe-best-match", *options]


def compile_programs(names: Iterable[str]) -> None:
    """Import modules, which keeps them compiled, even where Python is told to keep nothing."""
    run_python(f"import {', '.join(names)}")


def run_python(code: str) -> None:
    """Run code in this folder. Exits with an error if it fails."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=HERE, env=env, check=False)
    if done.returncode:
        raise SystemExit("error: the packages are installed, but cannot be used; the lines above say why")


def locked(installed: Iterable[tuple[str, str]]) -> str:
    """Lines "name==version" of installed packages: no addresses, no local versions such as 2.13.0+cpu."""
    versions = {canonical(name): version.partition("+")[0] for name, version in installed}
    return "".join(
        f"{name}=={version}\n" for name, version in sorted(versions.items()) if name not in NOT_LOCKED
    )


def canonical(name: str) -> str:
    """A package's name as indexes spell it: ruamel.yaml is ruamel-yaml."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
