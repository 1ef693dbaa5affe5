"""Start of the command line: at once, with only the imports that a command needs."""

import re
import subprocess
import sys
from importlib import import_module
from typing import get_type_hints

import pytest

from docs.tools.reference import parsers
from shardcore.cli import command_line_parser, commands, main
from shardcore.search import DEFAULT_SHARDER

COMMANDS = [name for name, _ in parsers(command_line_parser())]
RUN = """
import sys
from docs.tools.reference import parsers
from shardcore.cli import main, command_line_parser

try:
    code = main(sys.argv[2:])
except SystemExit as ended:
    code = ended.code
loaded = set(sys.argv[1].split(",")) & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else code)
"""


def run(*arguments: str, without: str) -> None:
    """Run a command in a process of its own; it has to end well, and not to load these modules."""
    done = subprocess.run([sys.executable, "-c", RUN, without, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_loads_no_large_library():
    run("-h", without="torch,numba,scipy,pyarrow,matplotlib,safetensors")


def test_each_command_is_a_function_of_its_options():
    for name, (module, options) in commands.COMMANDS.items():
        run_of = getattr(import_module(f"shardcore.cli.{module}"), name.replace(" ", "_").replace("-", "_"))
        [kind] = [hint for hint in get_type_hints(run_of).values() if hint is not type(None)]
        assert kind is options, name
    groups = {name.partition(" ")[0] for name in commands.COMMANDS if " " in name}
    assert groups == set(commands.GROUPS)


@pytest.mark.parametrize("columns", ["60", "300"])  # argparse wraps, or does not
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "-h"])
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert ended.value.code == 0 and f"usage: shardcore {command}" in usage and "None" not in rest
    # What excludes each other is in brackets, with nothing between two groups.
    assert not re.search(r"\| --[\w-]+ \w+  --", " ".join(usage.split("\n")))


def test_help_names_the_default_sharder(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "-h"])
    assert f"--algorithm ALGORITHM {DEFAULT_SHARDER}, the default" in " ".join(
        capsys.readouterr().out.split()
    )


def test_planning_and_pricing_need_no_torch(stored, model):
    problem, plan = str(stored / "problem.json"), str(stored / "plan.json")
    run("plan", problem, "--model", str(model), "--algorithm", "size_greedy", "--out", plan, without="torch")
    run("price", plan, "--problem", problem, "--model", str(model), without="torch")


def test_output_that_nobody_reads_is_no_error(tmp_path):
    command = [sys.executable, "-m", "shardcore", "problem", "hugectr-180", "--out", tmp_path / "p.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        output = running.stderr.read()
    assert (running.returncode, output) == (141, "") and (tmp_path / "p.json").exists()


@pytest.mark.parametrize("command", [["-h"], ["plan", "-h"]])
def test_help_whose_reader_is_gone_ends_without_a_word(command):
    running = subprocess.Popen(
        [sys.executable, "-m", "shardcore", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running.stdout.close()
    assert running.stderr.read() == "" and running.wait() in (0, 141)  # argparse itself may see it
