"""A problem and a model as files, for the commands."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from laws import SETTING, trained

from shardcore import cli
from shardcore.core.access_statistics import Zipf
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.cost import fit, neural
from shardcore.io import files

MIB = 1 << 20


@pytest.fixture(scope="session", autouse=True)
def one_parser():
    """Commands of these tests share a parser, which takes 30 ms to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "command_line_parser", cache(cli.command_line_parser))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("cli") / "model"
    neural.save(trained(), folder)
    return folder


@pytest.fixture
def few_epochs(monkeypatch):
    """Trainings by default settings take two epochs. What they learn is not looked at."""
    initial = fit.FitConfig.__init__
    monkeypatch.setattr(initial, "__defaults__", (2, *initial.__defaults__[1:]))


@pytest.fixture
def problem() -> Problem:
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(f"t{i}", int(rng.integers(100, 4000)), 16, float(rng.uniform(1, 10)), Zipf(1.0))
        for i in range(24)
    )
    return Problem("shifting", tables, Topology((Device(4 * MIB),) * 4), SETTING.batch)


@pytest.fixture
def now(problem) -> Problem:
    """The problem as it is now: a few tables are looked up much more."""
    return replace(
        problem,
        tables=tuple(replace(t, pooling=3 * t.pooling) if i < 6 else t for i, t in enumerate(problem.tables)),
    )


@pytest.fixture
def stored(problem, tmp_path) -> Path:
    """A folder with the problem's file."""
    files.write_problem(tmp_path / "problem.json", problem)
    return tmp_path
