"""Times of messages between pairs of real processes."""

import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from shapes import on_hosts

from shardcore.cli import main
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.types import Problem, Table
from shardcore.io import files
from shardcore.measure import local_ranks, pairs

QUICK = pairs.PairConfig(message_kib=16, sweeps=2, repeats=1, load_kib=64)


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_every_pair_meets_once_and_no_rank_twice_in_a_round(n):
    found = list(pairs.pair_rounds(n))
    assert sorted(pair for some in found for pair in some) == list(itertools.combinations(range(n), 2))
    assert all(len({r for pair in some for r in pair}) == 2 * len(some) for some in found)


def test_a_gang_times_all_of_its_pairs():
    noted = []
    found = pairs.measure_pairs(3, QUICK, note=lambda *done: noted.append(done))
    own = np.eye(3, dtype=bool)
    assert (found.pair_ms[~own] > 0).all() and not found.pair_ms[own].any()
    assert np.array_equal(found.pair_ms, found.pair_ms.T)
    assert noted == [(done, 6) for done in range(1, 7)]
    assert found.links.within_gbps > 0 and found.links.latency_ms > 0
    assert (not found.links.outward) == (found.levels == [])


def _links(rank, init_method, send):
    from shardcore.measure.collectives import init_process_group

    init_process_group(rank, 4, init_method, "cpu", 60.0)
    send(pairs.measure_links([((0, 2), (1, 3))], QUICK))


def test_links_are_those_of_given_groups_on_all_ranks():
    found = list(dict(local_ranks.run_ranks("test", _links, 4, (), 60.0)).values())
    assert len(set(found)) == 1 and found[0].within_gbps > 0 and found[0].outward[0].gbps > 0


@pytest.mark.parametrize(
    "groups, expected",
    [
        (((0, 2), (1, 3)), [(0, 1), (2, 3)]),
        (((0, 1, 2),), []),
        (((0, 1), (2,)), [(0, 2)]),
        (((0,), (1,), (2,), (3,)), [(0, 2), (1, 3)]),
    ],
)
def test_ranks_of_different_groups_are_loaded_at_once(groups, expected):
    assert pairs._pairs_between_groups(groups) == expected


@pytest.fixture
def problem(tmp_path):
    path = tmp_path / "problem.json"
    files.write_problem(path, Problem("p", (Table("t", 100, 16, 2.0),), on_hosts("aaa"), 96))
    return path


def test_the_command_writes_the_problem_and_the_order(problem, tmp_path, capsys):
    out, ranks = tmp_path / "found.json", tmp_path / "ranks.json"
    asked = ["topology", "measure", str(problem), "--message-kib", "16", "--repeats", "2"]
    assert main([*asked, "--out", str(out), "--ranks", str(ranks)]) == 0
    output = capsys.readouterr().out
    written = json.loads(ranks.read_text())
    order = written["order"]
    assert written["nodes"] == [socket.gethostname()] * 3
    assert sorted(order) == [0, 1, 2] and f"order of ranks: {' '.join(map(str, order))}" in output
    found = files.read_problem(out)
    assert found.topology.link("within_host").gbps > 0 and found.tables == files.read_problem(problem).tables


def test_a_problem_with_towers_is_refused_before_anything_is_measured(tmp_path, capsys):
    path, pinned = tmp_path / "towers.json", (("t", ("a",)),)
    files.write_problem(
        path,
        Problem(
            "p",
            (Table("t", 100, 16, 2.0),),
            on_hosts("aabb"),
            96,
            constraints=Constraints(pinned=pinned),
            job=Job(tower_ratio=2.0),
        ),
    )
    assert main(["topology", "measure", str(path), "--out", str(tmp_path / "found.json")]) == 1
    assert "problem 'p' has towers (job.tower_ratio)" in capsys.readouterr().err


@pytest.mark.long
def test_the_ranks_of_a_job_measure_together(problem, tmp_path):
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        given = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]),
            "WORLD_SIZE": "3",
        }
        asked = [
            sys.executable,
            *(
                f"-m shardcore topology measure {problem} --message-kib 16 --repeats 2 --out "
                f"{tmp_path / 'found.json'}"
            ).split(),
        ]
        ranks = [
            subprocess.Popen(asked, env={**given, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
            for r in range(3)
        ]
        output = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert "order of ranks" in output[0] and output[1:] == ["", ""]
    assert files.read_problem(tmp_path / "found.json").topology.slowest_link.latency_ms > 0


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE is '2' and problem 'p' has 3 devices"),
        ({"RANK": "0"}, "WORLD_SIZE is None"),
        ({"RANK": "first", "WORLD_SIZE": "3"}, "RANK is 'first'; it needs a whole number of 0 to 2"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "RANK is '3'; it needs a whole number of 0 to 2"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "MASTER_ADDR is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "abc"},
            "MASTER_PORT is 'abc'; it needs a whole number of 0 to 65535",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "65536"},
            "MASTER_PORT is '65536'",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_RANK": "x"},
            "LOCAL_RANK is 'x'; it needs a whole number of 0 to 2",
        ),
    ],
)
def test_a_job_of_another_size_is_refused(variables, says, problem, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["topology", "measure", str(problem), "--out", str(tmp_path / "found.json")]) == 1
    assert says in capsys.readouterr().err and not (tmp_path / "found.json").exists()


def test_more_devices_than_processes_of_a_machine_are_refused_before_any_starts(tmp_path, capsys):
    path = tmp_path / "problem.json"
    files.write_problem(path, Problem("p", (Table("t", 100, 16, 2.0),), on_hosts("a" * 2048), 2048))
    assert main(["topology", "measure", str(path), "--out", str(tmp_path / "found.json")]) == 1
    assert "2,048 devices need as many processes on this machine, and at most 128" in capsys.readouterr().err
    assert multiprocessing.active_children() == [] and not (tmp_path / "found.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("job", [False, True])
def test_gpus_that_are_not_here_are_refused(problem, tmp_path, capsys, monkeypatch, job):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value) if job else monkeypatch.delenv(name, raising=False)
    command = ["topology", "measure", str(problem), "--device", "cuda", "--out", str(tmp_path / "found.json")]
    assert main(command) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_one_device_has_no_links(tmp_path, capsys):
    path = tmp_path / "problem.json"
    files.write_problem(path, Problem("p", (Table("t", 100, 16, 2.0),), on_hosts("a"), 96))
    assert main(["topology", "measure", str(path), "--out", str(tmp_path / "found.json")]) == 1
    assert "has one device; links need 2 or more" in capsys.readouterr().err


def test_bad_settings_are_refused():
    with pytest.raises(ShardCoreError, match="message_kib 0"):
        pairs.PairConfig(message_kib=0)
