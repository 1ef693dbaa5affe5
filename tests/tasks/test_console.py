"""Lines of a flow for a person: on a terminal, in a pipe, of a stage in another process. The log has all others."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import prefect
import pytest

from tasks import console
from tasks.console import RESULT, STAGE, Screen

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shown(monkeypatch):
    """Calls of show: (kind, message, share)."""
    calls = []
    monkeypatch.setattr(
        console, "_display", type("Recorder", (), {"show": lambda self, *a: calls.append(a)})()
    )
    return calls


# --- the screen ---------------------------------------------------------------------------------------------


def test_a_stage_its_result_and_warnings_are_a_line_each(clock):
    out = io.StringIO()
    screen = Screen(out, clock)
    clock.now += 1000
    screen.show("stage", "stage 2/6: measure")
    clock.now += 7
    screen.show("warning", "one GPU")
    screen.show("result", "measured 3 groups")
    screen.show("text", "a table")
    assert out.getvalue() == ("stage 2/6: measure\n  warning: one GPU\n  measured 3 groups (7 s)\na table\n")


def test_in_a_pipe_progress_is_a_line_every_half_minute_of_a_stage(clock):
    out = io.StringIO()
    screen = Screen(out, clock)
    clock.now += 29
    screen.show("stage", "train")  # counts anew
    for _ in range(100):
        clock.now += 1
        screen.show("progress", f"at {clock.now:.0f}", 0.256)
    assert out.getvalue() == "train\n   26%  at 159\n   26%  at 189\n   26%  at 219\n"
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def on_glass(written: str) -> list[str]:
    """The lines that a terminal shows once it was sent all that."""
    lines, row, column = [""], 0, 0
    for code, text in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", written):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif code == "\r":
            column = 0
        elif code == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif code == "\x1b[2K":
            lines[row] = ""
        elif code.endswith("A"):
            row -= int(code[2:-1])
        else:
            assert code.endswith("m"), f"this terminal does not know {code!r}"
    return lines


def drawn(written: str) -> list[str]:
    """All that stood in the live line, without colours."""
    found = (re.sub(r"\x1b\[[0-9;]*m", "", part).rstrip() for part in re.split(r"\r|\n|\x1b\[2K", written))
    return [part for part in found if "━" in part]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_on_a_terminal_a_live_line_says_stage_bar_rate_and_time_left_and_goes(clock, terminal):
    screen = Screen(terminal, clock)
    screen.show("stage", "stage 2/6: measure")
    screen.show("progress", "groups: 160 of 400, 10.2 a second, 24 s left", 0.5)
    screen.show("warning", "one [red]GPU :smile:")
    screen.show("result", "measured")
    screen.clear_live_line()
    screen.show("text", "bye")
    assert on_glass(terminal.getvalue()) == [
        "stage 2/6: measure",
        "  warning: one [red]GPU :smile:",
        "  measured (0 s)",
        "bye",
        "",
    ]
    assert re.fullmatch(
        r". stage 2/6: measure ━━━━━━╺━━━━━ groups: 160 of 400, 10.2 a second, 24 s left",
        drawn(terminal.getvalue())[-1],
    )


def test_a_stage_that_says_nothing_shows_that_it_runs(clock, terminal):
    screen = Screen(terminal, clock)
    screen.begin_stage("refresh")
    screen.clear_live_line()
    assert drawn(terminal.getvalue())[-1].endswith(" 0 s so far")
    assert not any(on_glass(terminal.getvalue()))


def test_a_live_line_never_wraps_and_a_table_is_left_as_it_is(clock, terminal):
    """A line that wrapped could not be erased."""
    screen = Screen(terminal, clock)
    screen.show("progress", "x" * 200, 0.0)
    screen.show("text", "a wide table " * 20)
    screen.clear_live_line()
    assert {len(line) <= 80 for line in drawn(terminal.getvalue())} == {True}
    assert "…" in terminal.getvalue()
    assert on_glass(terminal.getvalue())[0] == "a wide table " * 20


def test_work_that_is_done_leaves_its_stage_running(clock, terminal):
    screen = Screen(terminal, clock)
    screen.begin_stage("train")
    screen.show("progress", "epochs: 60 of 60", 1.0)
    screen.clear_live_line()
    assert re.fullmatch(r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] train ━{12} epochs: 60 of 60", drawn(terminal.getvalue())[-1])


def test_a_kill_leaves_the_terminal_its_cursor(clock, terminal):
    Screen(terminal, clock).begin_stage("refresh")
    assert "\x1b[?25l" not in terminal.getvalue()


def test_a_terminal_that_moves_no_cursor_gets_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    Screen(out, clock).show("progress", "x", 0.5)
    assert out.getvalue() == ""


def test_a_run_goes_on_when_nobody_reads_its_lines_any_more(clock):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    Screen(Closed(), clock).show("text", "x")


def test_a_run_goes_on_when_its_terminal_is_closed(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Closed(Terminal):
        def write(self, text):
            raise OSError(5, "Input/output error")

    screen = Screen(Closed(), clock)
    screen.show("stage", "measure")
    screen.show("progress", "x", 0.5)
    screen.clear_live_line()


# --- what of a log is shown ---------------------------------------------------------------------------------


def record(level, message, path=__file__, **extra):
    made = logging.getLogger("prefect.task_runs").makeRecord(
        "prefect.task_runs", level, path, 1, message, ("a",), None, extra=extra
    )
    return console._ScreenHandler().emit(made)


def test_of_a_log_stages_results_and_our_warnings_are_shown(shown):
    record(logging.INFO, "setting %s")
    record(logging.INFO, "begins %s", **STAGE)
    record(logging.INFO, "measured %s", **RESULT)
    record(logging.WARNING, "few %s")
    record(logging.ERROR, "no %s")
    record(
        logging.ERROR,
        "Finished in state %s",
        os.path.join(os.path.dirname(prefect.__file__), "task_engine.py"),
    )
    assert shown == [
        ("stage", "begins a", 0.0),
        ("result", "measured a", 0.0),
        ("warning", "few a", 0.0),
        ("warning", "no a", 0.0),
    ]


def test_what_a_stage_in_another_process_says_comes_back_whole(shown, capsys):
    relay = console._Relay()
    relay.show("warning", 'two\nlines, "quoted"', 0.0)
    relay.show("progress", "epochs", 0.25)
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert len(lines) == 2 and all(map(console.show_if_marked, lines))
    assert shown == [("warning", 'two\nlines, "quoted"', 0.0), ("progress", "epochs", 0.25)]
    assert not console.show_if_marked("Running stage 'train':\n") and len(shown) == 2


def test_without_a_program_nothing_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(console, "_display", None)
    console.show_progress(0.5, "epochs")
    assert console.show_if_marked(console._MARK + json.dumps(["text", "x", 0.0]) + "\n")
    assert capsys.readouterr().out == ""


# --- as a program -------------------------------------------------------------------------------------------

PROGRAM = """
import logging, os, sys
from tasks import console, paths, services
paths.PARAMS.touch()
sys.argv[0] = "/somewhere/flows/measure.py"
def flow():
    logger = logging.getLogger("prefect.flow_runs")
    logger.setLevel("INFO")
    logger.info("to the log only")
    logger.info("measured", extra=console.RESULT)
    print("a library says")
    os.system("echo compiled code says >&2")
    console.show("text", "a table")
    {ends}
services.run_flow(flow, needs_prefect=False)
"""


def run(folder, ends="pass", **env):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    env.pop("PREFECT_API_URL", None)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ends=ends)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "ends, code, message",
    [
        ("pass", 0, ""),
        ("raise services.ShardCoreError('no table')", 1, "error: no table; log: "),
        (
            "raise KeyboardInterrupt",
            130,
            "stopped; what was finished is kept, and a rerun goes on from there; log: ",
        ),
        ("{}['lost']", 1, "error: KeyError: 'lost'; log: "),
    ],
)
def test_all_else_goes_to_a_log_that_is_named_first_and_last(tmp_path, ends, code, message):
    (tmp_path / "logs").mkdir()
    kept = [f"20200101-0000{i:02}-measure-1.log" for i in range(console.KEPT_LOGS)]
    for name in (*kept, "notes.txt"):
        (tmp_path / "logs" / name).touch()
    done = run(tmp_path, ends)
    first, *shown = done.stdout.splitlines()
    log = first.removeprefix("measure: every line of Prefect, DVC, Ray and MLflow goes to ")
    assert re.fullmatch(r"logs/\d{8}-\d{6}-measure-\d+\.log", log)
    assert done.returncode == code and shown[:2] == ["  measured (0 s)", "a table"]
    assert done.stderr == (f"{message}{log}\n" if message else "")
    assert shown[2:] == ([] if message else [f"done in 0 s; log: {log}"])
    text = (tmp_path / log).read_text()
    assert "a library says" in text and "compiled code says" in text
    assert ("Traceback" in text) == ("KeyError" in message)
    left = {p.name for p in (tmp_path / "logs").iterdir()}
    assert left == {*kept[1:], "notes.txt", os.path.basename(log)}  # the oldest went


def test_a_stage_of_a_refresh_says_everything_to_it_and_keeps_no_log(tmp_path):
    done = run(tmp_path, "raise services.ShardCoreError('no table')", **console.RELAYED)
    assert done.returncode == 1 and not (tmp_path / "logs").exists()
    assert done.stdout.splitlines() == [
        console._MARK + '["result", "measured", 0.0]',
        "a library says",
        console._MARK + '["text", "a table", 0.0]',
    ]
    assert done.stderr == "compiled code says\nerror: no table\n"


def test_outside_the_project_s_folder_nothing_is_written(tmp_path):
    code = "from tasks import services; services.run_flow(None)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: params.yaml is not in \S+: flows run in the project's folder\n", done.stderr)


def test_a_real_terminal_gets_a_live_line_of_its_width_and_the_log_no_colours(tmp_path):
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 60))
    ends = "console.show_progress(0.5, 'epochs: ' + 'x' * 99); logging.getLogger().warning('root')"
    code = "from prefect import flow as _\n" + PROGRAM.format(ends=ends)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    env.pop("PREFECT_API_URL", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=slave, stderr=slave, timeout=120
    )
    os.close(slave)
    output = os.read(master, 1 << 16).decode()
    os.close(master)
    [log] = (tmp_path / "logs").iterdir()
    first, *shown, last, _empty = on_glass(output)
    assert done.returncode == 0 and first.endswith(f"goes to logs/{log.name}"), output
    assert shown == ["  measured (0 s)", "a table"] and last == f"done in 0 s; log: logs/{log.name}"
    live = drawn(output)[-1]
    assert len(live) == 60 and re.fullmatch(r". measure ━━━━━━╺━━━━━ epochs: x+…", live), live
    assert "| WARNING | root - root" in log.read_text() and "\x1b" not in log.read_text()


INTERRUPTED = """
import sys
from tasks import owned, services
services._LAST_WORDS_S = float(sys.argv[1])
try:
    with owned.owned_run():
        services._run_command(sys.argv[2:])
except KeyboardInterrupt:
    print("ended")
"""


@pytest.mark.parametrize(
    "patience_s, last",
    [
        (60, "os.killpg(0, signal.SIGINT); time.sleep(60)"),
        (
            0.1,
            "signal.signal(signal.SIGINT, signal.SIG_IGN); print('stopped', flush=True); os.killpg(0, "
            "signal.SIGINT); time.sleep(60)",
        ),
    ],
    ids=["it stops", "it goes on"],
)
def test_an_interrupted_command_may_say_its_last_line_but_not_stay(patience_s, last):
    """Ctrl-C in a terminal interrupts all processes."""
    code = (
        f"import os, signal, time\ntry:\n    {last}\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5); print('stopped', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(patience_s), sys.executable, "-c", code],
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.stdout == "stopped\nended\n"
