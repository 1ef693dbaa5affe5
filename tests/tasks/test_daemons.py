import dataclasses
import os
import subprocess
import sys
import time

import psutil
import pytest
from waiting import until

from shardcore.core.errors import ShardCoreError
from tasks.daemons import Daemon

CHILD = "import subprocess, sys; print('first'); print('last', flush=True); subprocess.run(['sleep', '60'])"


@pytest.fixture
def daemon(tmp_path):
    made = Daemon("one", (sys.executable, "-c", CHILD), dict(os.environ), tmp_path)
    yield made
    made.stop(5)


def runs(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_it_runs_and_ends_with_what_it_started(daemon):
    assert daemon.process() is None and daemon.start_time() is None and not daemon.has_died()
    before = time.time()
    daemon.start()
    # Prefect's times are compared with it: a second more or less and a run counts as another worker's.
    assert before - 0.05 <= daemon.start_time() <= time.time()
    until(lambda: daemon.last_log_lines(1) == ["last"] and daemon.leftover_processes())
    assert daemon.last_log_lines(5) == ["first", "last"] and not daemon.has_died()
    leader, [child] = daemon.process(), daemon.leftover_processes()
    daemon.stop(5)
    assert not runs(leader) and not runs(child)
    assert daemon.process() is None and not daemon.has_died()


def test_one_that_was_started_with_other_settings_is_refused(daemon):
    assert not daemon.runs_as_configured()
    daemon.start()
    assert daemon.runs_as_configured()
    changed = dataclasses.replace(daemon, command=(*daemon.command, "--port", "1"))
    with pytest.raises(
        ShardCoreError, match=rf"one \(process {daemon.process().pid}\) runs with other settings"
    ):
        changed.runs_as_configured()
    elsewhere = dataclasses.replace(
        daemon, env={**daemon.env, "MLFLOW_BACKEND_STORE_URI": "sqlite:///other.db"}
    )
    with pytest.raises(ShardCoreError, match="runs with other settings"):
        elsewhere.runs_as_configured()


def test_a_killed_one_has_died_and_what_it_left_is_found(daemon):
    daemon.start()
    until(daemon.leftover_processes)
    [child] = daemon.leftover_processes()
    daemon.process().kill()
    until(daemon.has_died)
    assert daemon.leftover_processes() == [child]
    daemon.stop(5)
    assert not runs(child)


@pytest.mark.parametrize("killed", [False, True])
def test_what_wrote_over_its_environment_is_known_by_its_session(tmp_path, killed):
    """Also where its leader was killed and nobody has reaped it: its id is still taken then."""
    forgetful = Daemon(
        "two",
        (sys.executable, "-c", "import os; os.spawnve(os.P_WAIT, '/bin/sleep', ['sleep', '60'], {})"),
        dict(os.environ),
        tmp_path,
    )
    forgetful.start()
    until(forgetful.leftover_processes)
    [child] = forgetful.leftover_processes()
    if killed:
        leader = forgetful.process()
        leader.kill()
        until(lambda: leader.status() == psutil.STATUS_ZOMBIE)
        assert forgetful.has_died() and forgetful.leftover_processes() == [child]
    forgetful.stop(5)
    assert not runs(child)


def test_another_process_that_got_the_id_is_neither_taken_for_it_nor_ended(daemon, tmp_path):
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / "one.pid").write_text(str(other.pid))
        assert daemon.process() is None and daemon.has_died() and not daemon.leftover_processes()
        daemon.stop(5)
        assert psutil.Process(other.pid).is_running() and other.poll() is None
        (tmp_path / "one.pid").write_text("no number")
        assert daemon.process() is None and daemon.has_died()
    finally:
        other.kill()
        other.wait()


def test_the_log_of_the_run_before_is_kept(daemon):
    daemon.log_path.parent.mkdir()
    daemon.log_path.write_text("why it ended\n")
    daemon.start()
    assert daemon.log_path.with_name("one.log.1").read_text() == "why it ended\n"


def test_what_does_not_end_when_asked_is_killed(tmp_path):
    stubborn = Daemon(
        "three",
        (
            sys.executable,
            "-c",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('up', flush=True); time.sleep(60)",
        ),
        dict(os.environ),
        tmp_path,
    )
    stubborn.start()
    until(lambda: stubborn.last_log_lines(1) == ["up"])
    process = stubborn.process()
    stubborn.stop(0.5)
    assert not runs(process)


def test_control_characters_of_a_log_do_not_reach_the_terminal(tmp_path):
    daemon = Daemon("noisy", (), {}, tmp_path)
    daemon.log_path.parent.mkdir()
    daemon.log_path.write_bytes(b"\x1b]0;owned\x07\x1b[2Jhello\rworld \xff\n\n\x9b31mred\n")
    lines = daemon.last_log_lines(5)
    assert all(line.isprintable() for line in lines) and "hello" in " ".join(lines)
