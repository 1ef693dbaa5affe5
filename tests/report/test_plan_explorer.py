"""The part of a plan's page that one sorts, filters, hovers over and asks, in a real browser."""

import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from docs.tools.screenshots import Page, browser
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price, price_plan
from shardcore.cost.profile import load_profile
from shardcore.plans.decisions import PlanVersion
from shardcore.plans.what_if import WhatIf, price_single_moves
from shardcore.report import plan_explorer, plan_page
from shardcore.report.plan_explorer import explorer_html, script_policy
from shardcore.step.lower import lower

TABLES = tuple(Table(f"t{i}", 1000 * (i + 1), 8, float(10 - i)) for i in range(6))
PROBLEM = Problem("p", TABLES, Topology(tuple(Device(1 << 24, host=f"h{i // 2}") for i in range(4))), 64)
MODEL = AnalyticModel(Setting("made-up", 64))
needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")


def version(name: str, moved: int = 0, problem: Problem = PROBLEM) -> PlanVersion:
    """Tables over the devices in turn, the last one on all. The first few are one device further."""
    placements = [
        Placement("column", Shard.whole(t), ((i + (i < moved)) % 4,))
        for i, t in enumerate(problem.tables[:-1])
    ]
    placements.append(Placement("row", Shard.whole(problem.tables[-1]), (0, 1, 2, 3)))
    work = lower(Plan(tuple(placements)), problem)
    return PlanVersion(name, Plan(tuple(placements)), price(work, MODEL), work.memory_bytes)


def data_of(part: str) -> dict:
    return json.loads(re.search(r'id="plan-data">(.*?)</script>', part, re.DOTALL)[1])


def test_the_data_are_those_of_the_plan():
    now, before = version("version b", 1), version("version a")
    data = data_of(explorer_html(now, PROBLEM, before))
    assert [t["name"] for t in data["tables"]] == [t.name for t in TABLES]
    first, second, *_, last = data["tables"]
    assert first["is"] == [{"kind": "column", "columns": [0, 8], "dim": 8, "on": [1]}]
    assert first["was"][0]["on"] == [0] and first["moved"]
    assert second["was"] is None and not second["moved"]
    assert last["is"][0]["on"] is None  # all
    for shown, version_ in ((data, now), (data["before"], before)):
        parts = [sum(device["ms"]) for device in shown["devices"]]
        assert max(parts) == pytest.approx(version_.cost.total_ms, abs=1e-5)
        assert [device["used"] for device in shown["devices"]] == list(version_.memory_bytes)


def test_a_legend_and_a_scale_say_what_the_bars_are():
    now, before = version("version b", 1), version("version a")
    part = explorer_html(now, PROBLEM, before)
    for words, _, color in plan_explorer.PARTS:
        assert f'<i style="background:{color}"></i>{words}<' in part
    assert f"the highest is {max(now.cost.total_ms, before.cost.total_ms):.3f}" in part


def test_names_cannot_end_the_data():
    evil = "</script><script>alert(1)</script>"
    problem = replace(PROBLEM, tables=(replace(TABLES[0], name=evil), *TABLES[1:]))
    part = explorer_html(version("v", problem=problem), problem)
    assert evil not in part and data_of(part)["tables"][0]["name"] == evil


def test_very_large_plans_have_a_note_instead(monkeypatch):
    monkeypatch.setattr(plan_explorer, "MOST_TABLES", 5)
    note = explorer_html(version("v"), PROBLEM)
    assert "not drawn beyond 5 tables" in note and "<script" not in note


def in_browser(part: str, actions: str, folder) -> str:
    """The page in headless Chromium, once a script of the test has acted on it."""
    allowed = script_policy().replace("script-src", "script-src 'unsafe-hashes' 'nonce-test'")
    page = (
        '<!DOCTYPE html><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        f'<body>{part}<script nonce="test">{actions}</script></body>'
    )
    (folder / "page.html").write_text(page)
    done = subprocess.run(
        (
            "chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-sync "
            "--disable-background-networking --disable-component-update --disable-extensions --disable-dev-shm-usage "
            f"--user-data-dir={folder}/profile --dump-dom file://{folder}/page.html"
        ).split(),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout


def rows(dom: str) -> list[list[str]]:
    body = re.search(r'<tbody id="tables-body">(.*?)</tbody>', dom, re.DOTALL)[1]
    return [
        [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in body.split("</tr>")[:-1]
    ]


@needs_browser
@pytest.mark.long
def test_tables_are_sorted_and_filtered_and_a_device_shows_what_it_has(tmp_path):
    part = explorer_html(version("version b", 2), PROBLEM, version("version a"))
    seen = rows(in_browser(part, "", tmp_path))
    assert [row[0] for row in seen] == ["t5", "t4", "t3", "t2", "t1", "t0"]  # by weights
    assert seen[0][7] == "row on all devices"
    assert seen[-1][7:] == ["column on device 1", "column on device 0"]
    dom = in_browser(
        part,
        """
      const click = (column) => document.querySelector(`th[data-column=${column}]`).click();
      click("lookups"); click("lookups");
      document.querySelector("#devices [data-device='2']").dispatchEvent(new MouseEvent("mouseenter"));
      document.querySelector("#devices [data-device='2']").dispatchEvent(new MouseEvent("click"));
    """,
        tmp_path,
    )
    # Ascending by lookups: those on device 2, of which t5 is on all.
    assert [row[0] for row in rows(dom)] == ["t5", "t2", "t1"]
    assert "3 of 6 tables on device 2" in dom
    panel = re.search(r'<div id="device">(.*?)</div></div>', dom, re.DOTALL)[1]
    assert "Device 2, h1" in panel and "3 tables: t5, t2, t1" in panel and "(was " in panel
    dom = in_browser(
        part,
        """
      document.getElementById("moved").click();
      const filter = document.getElementById("filter");
      filter.value = "T1"; filter.dispatchEvent(new Event("input"));
    """,
        tmp_path,
    )
    assert [row[0] for row in rows(dom)] == ["t1"] and "1 of 6 tables" in dom
    dom = in_browser(
        part,
        """
      const kind = document.getElementById("kind");
      kind.value = "row"; kind.dispatchEvent(new Event("change"));
    """,
        tmp_path,
    )
    assert [row[0] for row in rows(dom)] == ["t5"]


@needs_browser
def test_columns_of_a_cut_table_are_named(tmp_path):
    table = Table("t", 1000, 8, 1.0)
    problem = Problem("p", (table,), Topology((Device(1 << 26),) * 2), 128)
    plan = Plan(tuple(Placement("column", Shard(table, 0, 1000, 4 * d, 4 * d + 4), (d,)) for d in range(2)))
    work = lower(plan, problem)
    part = explorer_html(PlanVersion("v", plan, price(work, MODEL), work.memory_bytes), problem)
    [row] = rows(in_browser(part, "", tmp_path))
    assert row[6:] == [
        "32,000 bytes",
        "column on device 0, columns 0:4 of 8; column on device 1, columns 4:8 of 8",
    ]


@needs_browser
def test_a_thousand_tables_on_many_devices_are_shown(tmp_path):
    tables = tuple(Table(f"t{i}", 1000, 8, 1.0) for i in range(1000))
    many = Problem("p", tables, Topology((Device(1 << 26),) * 128), 128)
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 128,)) for i, t in enumerate(tables)))
    work = lower(plan, many)
    dom = in_browser(
        explorer_html(PlanVersion("v", plan, price(work, MODEL), work.memory_bytes), many), "", tmp_path
    )
    assert len(rows(dom)) == 500 and "1000 of 1000 tables; the first 500 are shown" in dom
    assert dom.count("data-device=") == 2 * 128  # bars of ms, and of memory


def test_a_page_of_two_plans_says_that_their_model_was_not_measured():
    page = plan_page.plan_comparison_page(PROBLEM, version("version b", 1), version("version a"))
    assert "not measured: closed-form model" in page


# --- what moves would do ------------------------------------------------------------------------------------------


def asked(model) -> PlanVersion:
    """The plan of `version`, with what its moves would do."""
    priced = price_plan(version("v").plan, PROBLEM, model)
    return PlanVersion(
        "v",
        priced.plan,
        priced.cost,
        priced.workload.memory_bytes,
        price_single_moves(priced, PROBLEM, model),
    )


@contextmanager
def opened(page: str, folder):
    """A function that evaluates an expression in a page."""
    (folder / "page.html").write_text(page)
    with browser() as chrome:
        chrome.picture(Page((folder / "page.html").as_uri(), "Tables"))
        yield lambda expression: chrome.call("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")


def page_of(now: PlanVersion) -> str:
    return plan_page.unpublished_plan_page(PROBLEM, now)


@needs_browser
@pytest.mark.long
def test_a_table_s_moves_are_shown_as_the_library_prices_them(tmp_path):
    now = asked(load_profile("nvidia-h100-sxm").cost_model().for_problem(PROBLEM))
    key = "new KeyboardEvent('keydown', {{key: '{}', bubbles: true, cancelable: true}})"
    says = "document.getElementById('what-if-says').textContent"
    options = "[...document.getElementById('what-if-move').options].map((x) => x.textContent)"
    with opened(page_of(now), tmp_path) as evaluate:
        assert len(evaluate(options)) == len(now.what_if.best) and evaluate(says) == ""
        evaluate("document.querySelector('#tables-body tr').focus()")
        evaluate(f"document.activeElement.dispatchEvent({key.format('Enter')})")
        assert evaluate(says) == "t5 cannot move: it is on several devices (row), which share its exchanges."
        evaluate(f"document.activeElement.dispatchEvent({key.format('ArrowDown')})")
        assert evaluate("document.activeElement.firstChild.textContent") == "t4"
        evaluate(f"document.activeElement.dispatchEvent({key.format('Enter')})")
        first, *_ = of_table = now.what_if.of_table["t4"]
        assert len(evaluate(options)) == len(of_table) == 3
        assert evaluate(says).startswith(
            f"With t4 on device {first.devices[1]} instead of {first.devices[0]}, a step takes {first.total_ms:.3f} ms"
        ) and evaluate(says).endswith(" It fits.")
        rows = "[...document.querySelectorAll('#what-if-rows tr')].map((row) => row.children[2].textContent)"
        assert evaluate(rows) == [f"{x.busy_ms:.3f}" for x in first.changed]
        evaluate(f"document.dispatchEvent({key.format('Escape')})")
        assert evaluate(says) == "" and len(evaluate(options)) == len(now.what_if.best)
        evaluate("document.getElementById('theme').click()")
        dark = "getComputedStyle(document.body).backgroundColor"
        assert evaluate(dark) == "rgb(22, 25, 29)"
        evaluate("document.getElementById('theme').click()")
        assert evaluate(dark) == "rgb(255, 255, 255)"


def test_a_plan_without_moves_says_so():
    assert "No table of this plan is on one device alone" in explorer_html(
        replace(version("v"), what_if=WhatIf()), PROBLEM
    )


def test_a_sentence_names_the_bottleneck_and_why():
    now = asked(AnalyticModel(Setting("made-up", 64)))
    d = int(np.argmax(np.array(now.cost.compute_ms) + now.cost.backward_comm_ms))
    assert plan_explorer.bottleneck_sentence(now).startswith(
        f"Device {d} is the bottleneck, ready last: its compute "
    )
    assert " for table t" in plan_explorer.bottleneck_sentence(
        now
    ) and "the others wait" in plan_explorer.bottleneck_sentence(now)
