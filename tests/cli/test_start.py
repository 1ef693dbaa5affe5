"""Start of the command line: at once, with only the imports that a command needs."""

import subprocess
import sys

import pytest

from shardcore.cli import main
from shardcore.search import DEFAULT_SHARDER

COMMANDS = (
    "plan",
    "price",
    "replay",
    "export",
    "problem",
    "measure",
    "train",
    "train-policy",
    "report",
    "history",
    "diff",
    "drift",
)
RUN = """
import sys
from shardcore.cli import main

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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "-h"])
    output = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: shardcore {command}" in output and "None" not in output


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
