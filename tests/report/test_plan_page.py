"""The report page of a plan: what is in it, and that a browser shows it without asking anyone for
anything."""

import base64
import hashlib
import shutil
import socketserver
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price_plan
from shardcore.io import files
from shardcore.plans import store
from shardcore.plans.decisions import Decision, PlanVersion, version_name
from shardcore.plans.diff import diff_plans
from shardcore.report import plan_explorer, plan_page
from shardcore.report.device_figures import device_figure
from shardcore.search import SHARDERS, Budget
from shardcore.search.explain import explain

MODEL = AnalyticModel(Setting("made-up", 256))
BUDGET = Budget(evals=300)


@cache
def searched(problem):
    """A greedy plan, a searched one and its explanation."""
    old, new = (SHARDERS[name](problem, MODEL, budget=BUDGET) for name in ("size_greedy", "neuroshard"))
    return old, new, explain(price_plan(new, problem, MODEL), problem, MODEL, BUDGET, {})


def made(problem, **fields) -> str:
    """The page of a searched plan that took the place of a greedy one."""
    old, new, explained = searched(problem)
    first = Decision(
        problem.name,
        "first",
        "no plan was published",
        *[store.plan_version(old, problem)] * 2,
        files.problem_digest(problem),
        old.provenance["predicted_ms"],
        decided_at=1.7e9,
    )
    version = store.plan_version(new, problem)
    fields = {"outcome": "better", "current": version, "reason": "cheaper <b>by far</b>", **fields}
    second = replace(
        first,
        parent=first.id,
        decided_at=1.7e9 + 3600,
        candidate=version,
        previous_ms=2.0,
        candidate_ms=new.provenance["predicted_ms"],
        **fields,
        provenance={"model_version": "7", "git_commit": "abc"},
    )
    beyond = ("a table is <huge>", "2 is much", "3 is more", "4 is most")
    now = PlanVersion(
        version_name(version), new, replace(explained.cost, extrapolated=beyond), explained.memory_bytes
    )
    return plan_page.published_version_page(now, problem, explained, [second, first], diff_plans(old, new))


class Text(HTMLParser):
    """The words of a page, and the tags and attributes that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.tags, self.loads = [], [], []
        self.feed(page)

    def handle_data(self, data):
        self.words.append(data)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [
            v for k, v in attributes if k in ("src", "href", "xlink:href", "data") and not v.startswith("#")
        ]


def test_the_page_tells_all_of_a_plan_and_escapes_what_it_is_told(problem):
    page = made(problem)
    parsed = Text(page)
    words = " ".join(" ".join(parsed.words).split())
    for expected in (
        "small",
        "6 tables on 4 devices",
        "cheaper <b>by far</b>",
        "is ready last",
        "No plan takes less than",
        "10% more memory",
        "to move",
        "no plan was published",
        "model_version 7",
        "git_commit abc",
        "forward compute",
        "is the bottleneck",
        "a table is <huge>; 2 is much; 3 is more; 4 is most.",
        "2023-11-14 23:13:20 UTC",
    ):
        assert expected in words, expected
    assert words.count("cheaper <b>by far</b>") == 2  # above, and among the decisions
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{own_script()}'"
    assert f'content="{policy}">' in page
    assert (
        "svg" in parsed.tags
        and not {"link", "img", "iframe", "object"} & set(parsed.tags)
        and not parsed.loads
    )


def own_script() -> str:
    """The digest of the only script that a page may run."""
    return (
        "sha256-" + base64.b64encode(hashlib.sha256(plan_explorer.script_text().encode()).digest()).decode()
    )


def test_the_figure_stacks_the_parts_of_a_step_and_shows_memory_used_of_memory_free(problem):
    plan = SHARDERS["size_greedy"](problem, MODEL, budget=BUDGET)
    explained = explain(price_plan(plan, problem, MODEL), problem, MODEL, BUDGET, {})
    shown = PlanVersion("", plan, explained.cost, explained.memory_bytes)
    costs, memory = device_figure(problem, [shown]).axes
    tops = [[bar.get_y() + bar.get_height() for bar in bars] for bars in costs.containers]
    cost = explained.cost
    parts = (
        cost.forward_compute_ms,
        cost.backward_compute_ms,
        cost.waiting_ms,
        cost.forward_comm_ms,
        cost.backward_comm_ms,
        cost.input_ms,
    )
    for top, total in zip(tops, np.cumsum(parts, axis=0), strict=True):
        np.testing.assert_allclose(top, total)
    free, used = ([bar.get_height() * (1 << 20) for bar in bars] for bars in memory.containers)
    np.testing.assert_allclose(free, explained.free_bytes)
    np.testing.assert_allclose(used, explained.memory_bytes)
    assert memory.get_ylabel() == "memory, MiB"


def test_the_same_plan_gives_the_same_page(problem):
    page = made(problem)
    searched.cache_clear()
    assert made(problem) == page


def test_a_candidate_that_was_not_taken_says_so(problem):
    assert "considered, not taken" in made(problem, outcome="kept", current="a" * 16)
    assert "considered, not taken" not in made(problem)


@pytest.mark.parametrize("devices", [1, 128])
def test_one_device_and_many_are_drawn(problem, devices):
    many = replace(problem, topology=Topology((Device(16 << 20),) * devices), global_batch=128 * 2)
    page = made(many)
    assert f"6 tables on {devices} devices" in page and len(page) < 300_000


# --- in a browser -------------------------------------------------------------------------------------------


@contextmanager
def recording_proxy():
    """Its address, and the requests that were sent through it; all are answered with 404."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_CONNECT = do_POST = do_GET  # noqa: N815 (http.server's names)

        def log_message(self, *_):
            pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def screenshot(path, folder, proxy) -> np.ndarray:
    """[H, W, 3] pixels of a page in headless Chromium, all of whose requests go through the proxy."""
    from matplotlib.image import imread

    command = (
        "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync "
        f"--disable-extensions --disable-dev-shm-usage --proxy-server={proxy} "
        f"--proxy-bypass-list=<-loopback> --user-data-dir={folder}/profile --hide-scrollbars "
        f"--window-size=1100,2400 --screenshot={folder}/shot.png file://{path}"
    ).split()
    subprocess.run(command, check=True, timeout=200, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (imread(folder / "shot.png")[..., :3] * 255).round().astype(int)


def pixels_of(shot: np.ndarray, color: str) -> int:
    return int((abs(shot - [int(color[i : i + 2], 16) for i in (1, 3, 5)]).max(-1) <= 3).sum())


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
@pytest.mark.long
def test_a_browser_shows_the_figures_and_sends_no_request(problem, tmp_path):
    path, frame = tmp_path / "page.html", tmp_path / "frame.html"
    path.write_text(made(problem).replace("<h1>", '<img src="http://page.test/injected.png"><h1>'))
    frame.write_text(
        f'<img src="http://page.test/asked.png"><iframe src="file://{path}" width=1060 height=2300></iframe>'
    )
    with recording_proxy() as (proxy, asked):
        shot = screenshot(frame, tmp_path, proxy)
    asked = [a for a in asked if "page.test" in a]  # a browser has requests of its own, such as for updates
    # what the frame asks for is seen; the page's policy stops what is put in
    assert asked == ["http://page.test/asked.png"]
    for color in ("#66ccee", "#ee6677", "#228833"):  # backward compute and exchange, used memory
        assert pixels_of(shot, color) > 500, color
    assert pixels_of(shot, "#ffffff") > shot.shape[0] * shot.shape[1] // 2
