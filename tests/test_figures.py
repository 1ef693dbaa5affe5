"""All figures by one command: in order, once a commit, and again after a kill."""

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from bench import figures

ROOT = Path(__file__).parents[1]


def entry(name: str, *commands: str, **more) -> str:
    fields = {"name": name, "page": f"{name}.md", "minutes": 1, "commands": list(commands), **more}
    return "[[figure]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in fields.items())


@pytest.fixture
def table(tmp_path):
    """Writes a table; `--table` and `--out` for it."""

    def written(*entries: str) -> list[str]:
        (tmp_path / "figures.toml").write_text("\n".join(entries))
        return ["--table", str(tmp_path / "figures.toml"), "--out", str(tmp_path / "out")]

    return written


def test_entries_run_in_order_with_folders_of_those_before(table, tmp_path, capsys):
    given = table(
        entry("first", "echo 7 > {out}/number"),
        entry("second", "echo seen `cat {first}/number`", "echo and >&2; echo more"),
    )
    assert figures.main(given) == 0
    assert (tmp_path / "out/second/output.md").read_text().count("seen 7") == 1
    assert "more" in (tmp_path / "out/second/output.md").read_text()
    assert (tmp_path / "out/second/errors.log").read_text() == "and\n"
    done = json.loads((tmp_path / "out/second/done.json").read_text())
    assert done["hardware"].startswith("cpu") and done["seconds"] >= 0
    assert "[2 of 2] second: about 1 min; 1 min for all that are left" in capsys.readouterr().out


def test_what_is_done_at_this_commit_is_not_done_again(table, tmp_path, monkeypatch, capsys):
    given = table(entry("one", "echo x >> {out}/times"))
    times = tmp_path / "out/one/times"
    assert [figures.main(given) for _ in range(2)] == [0, 0]
    assert times.read_text() == "x\n" and "one: done before" in capsys.readouterr().out
    monkeypatch.setattr(figures, "git_commit", lambda: "another")
    assert figures.main(given) == 0
    assert times.read_text() == "x\n"  # from an empty folder
    assert json.loads((tmp_path / "out/one/done.json").read_text())["commit"] == "another"
    given = table(entry("one", "echo y >> {out}/times"))  # other commands are other figures
    assert figures.main(given) == 0
    assert times.read_text() == "y\n"


def test_a_failure_stops_only_what_needs_it(table, capsys):
    given = table(entry("bad", "exit 3"), entry("after", "cat {bad}/x"), entry("good", "true"))
    assert figures.main(given) == 1
    said = capsys.readouterr().out
    assert "bad: failed with code 3" in said and "after: skipped: needs bad, which is not done" in said
    assert "good: done in" in said


def test_what_is_not_here_is_skipped_with_the_reason(table, tmp_path, monkeypatch, capsys):
    given = table(entry("peer", "ls {with[peer]}"), entry("hosts", "true", root=True))
    monkeypatch.setattr(figures.os, "geteuid", lambda: 1000)
    assert figures.main(given) == 0
    said = capsys.readouterr().out
    assert "peer: skipped: needs --with peer=FOLDER" in said
    assert "hosts: skipped: emulates hosts, which needs root" in said
    assert figures.main([*given, "--with", f"peer={tmp_path}", "--only", "peer"]) == 0
    assert "figures.toml" in (tmp_path / "out/peer/output.md").read_text()


def test_only_takes_what_it_needs_too(table, tmp_path):
    given = table(entry("a", "true"), entry("b", "ls {a}"), entry("c", "true"))
    assert figures.main([*given, "--only", "b"]) == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"a", "b"}


@pytest.mark.long
def test_a_killed_entry_goes_on_in_its_folder(table, tmp_path):
    slow = "echo x >> {out}/times; test `wc -l < {out}/times` -gt 1 || sleep 60"
    given = table(entry("slow", slow))
    running = subprocess.Popen(
        [sys.executable, "-m", "bench.figures", *given],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    times = tmp_path / "out/slow/times"
    end = time.monotonic() + 60
    while not times.exists() and time.monotonic() < end:
        time.sleep(0.05)
    figures.os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "out/slow/done.json").exists()
    assert figures.main(given) == 0
    assert times.read_text() == "x\nx\n"


def headline(**more) -> str:
    return json.dumps({"name": "error", "pattern": r"error ([\d.]+)%", "low": 2, "high": 4, **more}).replace(
        '":', '" ='
    )


@pytest.mark.parametrize(
    "command, code, verdict",
    [
        ("echo error 2.5%", 0, r"error +2\.5 +2 to 4 +within"),
        ("echo error 4.5%", 1, r"error +4\.5 +2 to 4 +OUTSIDE"),
        ("echo nothing", 1, r"error +- +2 to 4 +MISSING"),
        ("echo error 2.5%; exit 3", 1, r"error +- +2 to 4 +MISSING"),
    ],
)
def test_headlines_get_a_verdict_and_bring_what_they_need(table, capsys, command, code, verdict):
    short = entry("short", "ls {model}", command) + f"headlines = [{headline()}]\n"
    given = table(entry("model", "true"), entry("other", "true"), short)
    assert figures.main([*given, "--headlines"]) == code
    said = capsys.readouterr().out
    assert re.search(verdict, said) and "other" not in said and "model" in said
    assert f"{1 - code} of 1 within their intervals, all at commit " in said


@pytest.mark.parametrize("more", [{"pattern": "no group"}, {"low": 5}])
def test_a_headline_without_a_figure_or_an_interval_is_refused(table, capsys, more):
    given = table(entry("short", "true") + f"headlines = [{headline(**more)}]\n")
    assert figures.main(given) == 1
    assert "it needs one group, and an interval" in capsys.readouterr().err


def test_headlines_take_a_quarter_of_an_hour():
    every = figures.read_figures(figures.TABLE)
    taken = figures.figures_with_dependencies(every, [figure.name for figure in every if figure.headlines])
    assert 5 <= sum(len(figure.headlines) for figure in taken) and sum(f.minutes for f in taken) <= 15
    assert not [figure.name for figure in taken if figure.required_folders or figure.root]


@pytest.mark.parametrize(
    "entries, more, words",
    [
        ([entry("b", "ls {a}"), entry("a", "true")], [], "b needs 'a', which is not before it"),
        ([entry("a", "true", colour="blue")], [], "colour"),
        ([entry("a", "true")], ["--only", "z"], "there is no figure 'z'; there are a"),
        ([entry("a", "true")], ["--with", "peer"], "--with peer names no folder"),
    ],
)
def test_bad_input_is_refused(table, capsys, entries, more, words):
    assert figures.main([*table(*entries), *more]) == 1
    assert words in capsys.readouterr().err


def test_every_bench_is_taken_or_excused():
    taken = {
        name
        for figure in figures.read_figures(figures.TABLE)
        for command in figure.commands
        for name in re.findall(r"-m bench\.(\w+)", command)
    }
    excused = tomllib.loads(figures.TABLE.read_text())["unattended"]
    there = {p.stem for p in (ROOT / "bench").glob("*.py")} - {"__init__", "figures"}
    assert there - taken - set(excused) == set()
    assert set(excused) <= there and not set(excused) & taken


def test_every_page_of_the_table_is_there():
    pages = {figure.page for figure in figures.read_figures(figures.TABLE)}
    assert pages <= {p.name for p in (ROOT / "docs/benchmarks").glob("*.md")}
