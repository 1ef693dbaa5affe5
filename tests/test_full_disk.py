"""A disk that is full while a part is written: a limit of the file's size, at which the kernel refuses to
write."""

import contextlib
import os
import resource
import subprocess

import pytest
from laws import SETTING, compute_samples, linear_law, pool, trained

from shardcore.cli import main
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.cost import neural
from shardcore.io import dataset, files, writing


@contextlib.contextmanager
def room_for(size):
    """Only so many bytes in any file of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 4096, 9999])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, size):
    path = tmp_path / "plans/plan.json"
    writing.write_atomic(path, b"of before")
    with room_for(size), pytest.raises(ShardCoreError, match=rf"^cannot write {path}: File too large$"):
        writing.write_atomic(path, bytes(10_000))
    assert path.read_bytes() == b"of before" and os.listdir(path.parent) == ["plan.json"]
    with room_for(10_000):
        writing.write_atomic(path, bytes(10_000))
    assert path.read_bytes() == bytes(10_000)


def test_a_part_that_finds_no_room_loses_nothing_that_was_there(tmp_path):
    samples = list({s.id: s for s in compute_samples(linear_law, 40)}.values())
    name = dataset.write_pool(tmp_path, pool())
    dataset.write_compute_samples(tmp_path, samples[:20], name)
    there = sorted(os.listdir(tmp_path))
    with (
        room_for(2000),
        pytest.raises(ShardCoreError, match=r"^cannot write \S+/compute-\S+: File too large$"),
    ):
        dataset.write_compute_samples(tmp_path, samples[20:], name)
    assert sorted(os.listdir(tmp_path)) == there
    assert {s.id for s in dataset.read_compute_samples(tmp_path, SETTING)} == {s.id for s in samples[:20]}
    dataset.write_compute_samples(tmp_path, samples[20:], name)
    assert {s.id for s in dataset.read_compute_samples(tmp_path, SETTING)} == {s.id for s in samples}


def test_a_report_on_a_full_disk_leaves_no_picture(tmp_path, capsys):
    samples = compute_samples(linear_law, 20)
    dataset.write_compute_samples(tmp_path / "data", samples, dataset.write_pool(tmp_path / "data", pool()))
    asked = ["report", str(tmp_path / "data"), "--out", str(tmp_path / "plots")]
    with room_for(2000):
        assert main(asked) == 1
    assert "File too large" in capsys.readouterr().err and os.listdir(tmp_path / "plots") == []
    assert main(asked) == 0
    [plot] = (tmp_path / "plots").iterdir()
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_on_a_disk_without_room_nothing_is_written_and_nothing_stays(tmp_path, capsys, cli_files):
    problem, model = cli_files
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        (disk / "filler").write_bytes(bytes(64 << 10))
        for asked in (
            f"plan {problem} --model {model} --budget-evals 50 --out {disk}/plan.json",
            f"plan {problem} --model {model} --budget-evals 50 --out {disk}/new/plan.json",
            f"problem mlperf-dlrm-dcnv2 --out {disk}/problem.json",
        ):
            assert main(asked.split()) == 1
            assert "No space left on device" in capsys.readouterr().err
        assert [p for p in disk.rglob("*") if p.is_file()] == [disk / "filler"]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def cli_files(tmp_path):
    """A problem and a model."""
    problem = Problem(
        "p",
        tuple(Table(f"t{i}", 500, 16, 2.0) for i in range(6)),
        Topology((Device(1 << 22),) * 2),
        SETTING.batch,
    )
    files.write_problem(tmp_path / "p.json", problem)
    neural.save(trained(), tmp_path / "model")
    return tmp_path / "p.json", tmp_path / "model"
