"""Processes of a run end with it: at its own end, by a signal, and if its guardian is killed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from waiting import until

from tasks import owned

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, subprocess, sys, time
from tasks.owned import RUN, end_with_parent, marking_servers, owned_run
def start(code="", *arguments, **options):
    code += "\\nprint(flush=True); import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    return str(process.pid)
with owned_run():
    {starts}
    open(os.environ["TMPDIR"] + "/file", "w").close()
    print(os.environ[RUN], *started, flush=True)
    {ends}
"""
SLEEPERS = "started = [start(), start(start_new_session=True)]"


def is_alive(pid):
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(starts=SLEEPERS, ends="time.sleep(600)"):
    """A run, its folder, and the ids of what it started."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(starts=starts, ends=ends)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    folder, *started = process.stdout.readline().split()
    return process, Path(folder), started


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_what_a_killed_run_started_ends_and_its_folder_goes(number):
    process, folder, started = run()
    assert (folder / "file").exists() and all(map(is_alive, started)) and len(started) == 2
    process.send_signal(number)
    until(lambda: not folder.exists())
    assert not any(map(is_alive, started)) and process.wait(60) != 0
    assert process.stderr.read().endswith(
        "error: this run was ended before its end; " + owned.GOES_ON + "\n"
    ) == (
        # which Python hears, and tells of itself
        number != signal.SIGINT
    )


def test_a_run_that_ends_by_itself_leaves_nothing_when_it_has():
    process, folder, started = run(ends="pass")
    assert process.wait(60) == 0 and not folder.exists() and not any(map(is_alive, started))
    assert process.stderr.read() == ""


def test_servers_end_after_those_that_tell_them_how_they_ended(tmp_path):
    """The client finds its server when it is asked to end."""
    client = (
        "import signal, sys\ndef asked(*_):\n    open(sys.argv[1], "
        "'w').write(open(f'/proc/{sys.argv[2]}/stat').read())\n"
        "    sys.exit()\nsignal.signal(signal.SIGTERM, asked)"
    )
    output = tmp_path / "said"
    process, folder, (server, asked) = run(f"""
    with marking_servers():
        server = start()
    started = [server, start({client!r}, {str(output)!r}, server)]""")
    process.kill()
    until(lambda: not folder.exists())
    pid, _, state, *_ = output.read_text().split()
    assert pid == server and state not in "ZX" and not is_alive(server) and not is_alive(asked)


def test_a_run_whose_guardian_is_killed_ends_all_itself():
    process, folder, started = run(ends="while os.path.exists(os.environ[RUN] + '/file'): time.sleep(0.01)")
    [guardian] = [p for p in psutil.Process(process.pid).children() if "owned.py" in " ".join(p.cmdline())]
    [ignored] = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{guardian.pid}/status").read_text())
    assert all(
        int(ignored, 16) >> number - 1 & 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    )
    guardian.kill()
    (folder / "file").unlink()
    assert process.wait(60) == 0 and not folder.exists() and not any(map(is_alive, started))


def test_what_a_run_left_that_was_killed_with_its_guardian_goes_with_the_next_run(monkeypatch, tmp_path):
    process, folder, started = run()
    running, other, _ = run()
    [guardian] = [p for p in psutil.Process(process.pid).children() if "owned.py" in " ".join(p.cmdline())]
    (tmp_path / "shardcore-of-something-else").mkdir()
    try:
        for victim in (process, guardian):
            os.kill(victim.pid, signal.SIGSTOP)  # so that neither sees the other end
        for victim in (guardian, process):
            victim.kill()
        until(lambda: not is_alive(guardian.pid) and not is_alive(process.pid))
        assert all(map(is_alive, started)) and folder.exists()
        with owned.owned_run():
            assert not any(map(is_alive, started)) and not folder.exists()
        assert other.exists() and running.poll() is None
        monkeypatch.setattr(owned, "short_temporary_folder", lambda: str(tmp_path))
        owned.end_abandoned_runs()
        assert (tmp_path / "shardcore-of-something-else").exists()
    finally:
        running.kill()
        until(lambda: not other.exists())


def test_a_process_ends_with_the_one_that_started_it_and_does_not_begin_after_it():
    ends = "from tasks.owned import end_with_parent; end_with_parent()"
    process, folder, [parent, child] = run(f"""
    import psutil
    parent = start("import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {ends!r} + "
                   "'; print(flush=True); import time; time.sleep(600)'], stdout=-1); p.stdout.readline()")
    started = [parent, psutil.Process(int(parent)).children()[0].pid]""")
    os.kill(int(parent), signal.SIGKILL)
    until(lambda: not is_alive(child))
    process.kill()
    until(lambda: not folder.exists())
    late = subprocess.run(
        [sys.executable, "-c", ends],
        cwd=ROOT,
        env={**os.environ, owned.RUN: "/tmp/of-another"},
        text=True,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert late.returncode == 1 and late.stderr == "the process that started this one has ended\n"


def test_within_it_temporary_files_are_in_its_folder_and_then_all_is_as_before():
    before = dict(os.environ), tempfile.gettempdir()
    with owned.owned_run():
        folder = os.environ[owned.RUN]
        assert (
            tempfile.gettempdir() == folder == os.environ["TMPDIR"]
            and oct(os.stat(folder).st_mode)[-3:] == "700"
        )
        with owned.owned_run():  # another's
            assert os.environ[owned.RUN] == folder
        with owned.marking_servers():
            assert os.environ[owned.SERVES]
        assert os.path.isdir(folder) and owned.SERVES not in os.environ
    assert (dict(os.environ), tempfile.gettempdir()) == before and not os.path.exists(folder)


def test_the_folder_is_where_paths_of_ray_s_sockets_are_short_enough(tmp_path, monkeypatch):
    for base, found in ((tmp_path / ("x" * 60), "/tmp"), (Path("/var/tmp"), "/var/tmp")):
        base.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        assert owned.short_temporary_folder() == found


def test_what_does_not_end_when_it_is_asked_is_killed():
    stubborn = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print(flush=True); time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
    )
    stubborn.stdout.readline()
    owned.end_processes(lambda: [psutil.Process(stubborn.pid)] if stubborn.poll() is None else [], 0.1)
    assert stubborn.returncode == -signal.SIGKILL
