"""Processes of gangs and workers: their environment, and that they end with the one that started them."""

import os
import sys

from shardcore.measure import processes


def tell(pipe, names):
    pipe.send(([os.environ.get(name) for name in names], os.getcwd(), "torch" in sys.modules))


def told(names):
    pipe, theirs = processes.process_context().Pipe(duplex=False)
    process = processes.make_process("teller", tell, (theirs, names))
    process.start()
    theirs.close()
    output = pipe.recv()
    process.join()
    assert process.exitcode == 0 and process.name == "teller"
    return output


def test_each_has_the_environment_and_folder_of_its_start(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDCORE_TOLD", "first")
    before = dict(os.environ)
    assert told(["SHARDCORE_TOLD"])[0] == ["first"]
    assert dict(os.environ) == before
    monkeypatch.setenv("SHARDCORE_TOLD", "second")
    monkeypatch.chdir(tmp_path)
    assert told(["SHARDCORE_TOLD"])[:2] == (["second"], str(tmp_path))
    monkeypatch.delenv("SHARDCORE_TOLD")
    assert told(["SHARDCORE_TOLD"])[0] == [None]


def test_torch_keeps_quiet_unless_told(monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert told(["TORCH_CPP_LOG_LEVEL"])[0] == ["ERROR"]
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert told(["TORCH_CPP_LOG_LEVEL"])[0] == ["INFO"]


def test_they_start_with_torch():
    assert told([])[2]
