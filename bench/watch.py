"""How soon plans follow the champion: the alias set back and forth between two versions in MLflow, on a stack
made for this.

Measures, trains two models and promotes at toy size, in a scratch folder that is removed at the end; then
`champion` is set by MLflow's API, as a person would, each time after a wait drawn at random from 0 to 6 s.
Noticed: when the watch says that it asked for the run; published: when all plans were published under the
version (the registered model's tag). Exit code 1 where that takes longer than wanted (10 s, 60 s). About 5
minutes on 2 cores.

    python -m bench.watch --changes 10 --problems 2
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path

import mlflow

from bench.toy_stack import ToyStack, toy_stack
from shardcore import report
from tasks import publish_claim, registry

WANTED_S = {"noticed": 10.0, "published": 60.0}
PATIENCE_S = 300.0


def asked_at(log: Path, version: str, since: float) -> float:
    """When the watch asked for the run of a change at `since`, in Unix s."""
    for line in log.read_text().splitlines():
        found = re.match(rf"(\S+ \S+),(\d+) plans under \S+ version {version}: run ", line)
        if found and (at := datetime.fromisoformat(found[1]).timestamp() + int(found[2]) / 1000) >= since:
            return at
    sys.exit(f"{log} says nothing of a run under version {version}:\n{log.read_text()[-2000:]}")


def until_published(client: mlflow.MlflowClient, model: str, version: str) -> float:
    """When plans were published under a version, in Unix s."""
    deadline = time.monotonic() + PATIENCE_S
    while (state := publish_claim.read(client, model)).published != version:
        if time.monotonic() > deadline:
            sys.exit(f"{model}: nothing published under version {version} within {PATIENCE_S:.0f} s: {state}")
        time.sleep(0.5)
    return state.at


def measure(stack: ToyStack, changes: int, rng: random.Random) -> dict[str, list[float]]:
    """Seconds after each change of the alias."""
    client, log = mlflow.MlflowClient(), stack.project / stack.config.folder / "logs/watch.log"
    [model] = [m.name for m in client.search_registered_models()]
    versions = sorted({str(v.version) for v in client.search_model_versions(f"name = '{model}'")})
    champion = publish_claim.read(client, model).champion
    until_published(client, model, champion)
    found = {name: [] for name in WANTED_S}
    for _ in range(changes):
        time.sleep(rng.uniform(0, 6))
        champion = next(v for v in versions if v != champion)
        began = time.time()
        client.set_registered_model_alias(model, registry.CHAMPION, champion)
        found["published"].append(until_published(client, model, champion) - began)
        found["noticed"].append(asked_at(log, champion, began) - began)
        print(*(f"{name} after {seconds[-1]:.1f} s" for name, seconds in found.items()), sep=", ", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=10, help="of the alias (10)")
    parser.add_argument("--problems", type=int, default=2, help="to publish plans for (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the waits (0)")
    args = parser.parse_args()
    with toy_stack() as stack:
        stack.promote_a_model(args.problems)
        stack.set_params("train", seed=1)
        for stage in ("train", "promote"):
            stack.run(f"flows.{stage}")
        os.environ.update(stack.client_env())
        found = measure(stack, args.changes, random.Random(args.seed))
    rows = [
        (
            f"champion changed to {'plans ' if name == 'published' else ''}{name}",
            len(seconds),
            *(f"{f(seconds):.1f}" for f in (min, statistics.median, max)),
            f"{WANTED_S[name]:.0f}",
        )
        for name, seconds in found.items()
    ]
    print(report.text_table(("what", "times", "best s", "median s", "worst s", "wanted s"), rows))
    print(f"{args.problems} problems; {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}")
    return int(any(max(seconds) > WANTED_S[name] for name, seconds in found.items()))


if __name__ == "__main__":
    sys.exit(main())
