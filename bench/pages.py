"""Plan pages at size: bytes, and seconds to price moves, to load, filter, sort and choose.

    python -m bench.pages INPUTS --model MODEL [--pictures FOLDER]

INPUTS is as for bench.workloads: its production list has 1,935 tables on 96 devices, and TorchRec's published plan.
Times are of headless Chromium, the median of five; of moves, one run.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import workloads
from docs.tools.screenshots import Browser, Page, browser
from shardcore import report
from shardcore.core.types import Plan, Problem
from shardcore.cost import neural
from shardcore.cost.model import CostModel, price_plan
from shardcore.io import files
from shardcore.plans.decisions import PlanVersion
from shardcore.plans.what_if import price_single_moves
from shardcore.report import plan_page
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget

EVALS = 2000
_LISTS = ("mlperf-dlrm-dcnv2-8-", "merlin-medium-16-")
_ACTS = {
    "filter": "const f = document.getElementById('filter'); f.value = '_1' + i; f.dispatchEvent(new Event('input'))",
    "show all again": "const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input'))",
    "sort": "document.querySelector('th[data-column=lookups]').click()",
    "choose a table": "document.querySelector('#tables-body tr:nth-child(' + (i + 3) + ')').click()",
    "choose a move": "const s = document.getElementById('what-if-move'); s.selectedIndex = i; "
    "s.dispatchEvent(new Event('change'))",
}
"""Scripts by name. i: number of the repeat."""


def plans_to_show(inputs: Path, folder: Path | None) -> Iterator[tuple[Problem, Plan, CostModel, str]]:
    """Plans to show: problem, plan, cost model and title."""
    for problem, profile in workloads.public_workloads():
        if problem.name.startswith(_LISTS):
            yield problem, *_default_plan_and_model(problem, None, profile.cost_model()), "a profile"
    problem, profile, theirs = workloads.production_workload(inputs)
    yield problem, *_default_plan_and_model(problem, theirs, profile.cost_model()), "a profile"
    if folder:
        for path in sorted(Path("problems").glob("pool-7-0[01].json")):
            problem = files.read_problem(path)
            yield problem, *_default_plan_and_model(problem, None, neural.load(folder)), "a trained model"


def _default_plan_and_model(problem: Problem, plan: Plan | None, model: CostModel) -> tuple[Plan, CostModel]:
    model = model.for_problem(problem)
    return plan or SHARDERS[DEFAULT_SHARDER](problem, model, budget=Budget(evals=EVALS)), model


def open_in_browser(page: Path, chrome: Browser, scheme: str = "light") -> Callable[[str], Any]:
    """Open a page in a browser. Returns a function that evaluates JavaScript in the page."""
    chrome.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    chrome.picture(Page(page.as_uri(), "Tables", height=1500))

    def evaluate(expression: str) -> Any:
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        return chrome.call("Runtime.evaluate", **asked)["result"].get("value")

    return evaluate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--model", type=Path, help="a trained model, for problems/pool-7-00 and -01")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="pictures of the largest, light and dark"
    )
    args = parser.parse_args()
    times = []
    with tempfile.TemporaryDirectory() as folder, browser() as chrome:
        page = Path(folder, "page.html")
        for problem, plan, model, name in plans_to_show(args.inputs, args.model):
            priced = price_plan(plan, problem, model, fits=False)
            began = time.perf_counter()
            known = price_single_moves(priced, problem, model)
            moves = f"{len(known.best) + sum(map(len, known.of_table.values()))} in {time.perf_counter() - began:.1f} s"
            version = PlanVersion("plan", plan, priced.cost, priced.workload.memory_bytes, known)
            page.write_text(plan_page.unpublished_plan_page(problem, version))
            evaluate, size = open_in_browser(page, chrome), f"{len(problem.tables)} × {len(problem.topology)}"
            load = evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
            # Median of five runs of each action, with page layout.
            took = [
                "{:.0f}".format(
                    evaluate(
                        "(async () => { const took = []; "
                        "for (let i = 0; i < 5; i++) { const began = performance.now(); "
                        f"(() => {{ {act} }})(); document.body.offsetHeight; took.push(performance.now() - began); "
                        "await new Promise((done) => setTimeout(done, 50)); } "
                        "return took.sort((a, b) => a - b)[2]; })()"
                    )
                )
                for act in _ACTS.values()
            ]
            times.append(
                (problem.name, size, name, moves, f"{page.stat().st_size / 1e3:,.0f}", f"{load:.0f}", *took)
            )
            if args.pictures and problem.name.startswith("production"):
                for scheme in ("light", "dark"):
                    open_in_browser(page, chrome, scheme)("document.querySelector('#tables-body tr').click()")
                    shot = chrome.call("Page.captureScreenshot", format="png")["data"]
                    (args.pictures / f"what-if-{scheme}.png").write_bytes(base64.b64decode(shot))
    print(
        report.markdown_table(
            ("plan", "tables × devices", "model", "moves", "kB", "load, ms", *(f"{x}, ms" for x in _ACTS)),
            times,
        )
    )


if __name__ == "__main__":
    main()
