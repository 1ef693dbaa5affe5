"""How the command line starts: at once, with what a command needs and nothing else."""

import subprocess
import sys

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law

from shardcore import files
from shardcore.cli import main
from shardcore.cost import fit, neural
from shardcore.search import DEFAULT_SHARDER
from shardcore.types import Device, Problem, Table, Topology, Zipf

COMMANDS = ("plan", "price", "replay", "export", "problem", "measure", "train", "report", "history", "diff", "drift")
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
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"python -m shardcore {command}" in said and "None" not in said


def test_help_names_the_default_sharder(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "-h"])
    assert f"--algorithm ALGORITHM {DEFAULT_SHARDER}, the default" in " ".join(capsys.readouterr().out.split())


def test_planning_and_pricing_need_no_torch(tmp_path):
    table = Table("t", 1000, 16, 5.0, Zipf(1.0))
    problem = Problem("one", (table,), Topology((Device(4 << 20),) * 2), SETTING.batch)
    files.write_problem(tmp_path / "problem.json", problem)
    model = fit.train(compute_samples(linear_law, 60), comm_samples(20), SETTING, fit.FitConfig(epochs=1)).model
    neural.save(model, tmp_path / "model")
    asked = str(tmp_path / "problem.json"), str(tmp_path / "model"), str(tmp_path / "plan.json")
    run("plan", asked[0], "--model", asked[1], "--algorithm", "size_greedy", "--out", asked[2], without="torch")
    run("price", asked[2], "--problem", asked[0], "--model", asked[1], without="torch")
