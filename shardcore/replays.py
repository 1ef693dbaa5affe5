"""Replays that are kept: a folder for each problem, with its plans, so that any model can price what was replayed, and one can
be trained on it.

  problem.json    as files.write_problem
  <plan>.json     as files.write_plan; named by the digest of what it places
  replays.json    schema shardcore/replays, version 1: the setting, the ReplayConfig and dataset.MEASUREMENT_VERSION (without one:
                  2); `replays`: algorithm (or kind of plan), plan, total_ms and the parts of each; sealed by a digest. Written
                  last, so a folder without it holds no replays; nor does one of another measurement version
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shardcore import dataset, files, schema
from shardcore.cost.model import CostModel, price
from shardcore.cost.reality import Judged, noise_ms
from shardcore.cost.steps import Step
from shardcore.types import MOST_MS, MOST_SPEED, Plan, Problem, Replayed, Setting, ShardCoreError, Spread, StepCost
from shardcore.workload import Workload, lower

SCHEMA, VERSION = "shardcore/replays", 1
REPLAYS_JSON, PROBLEM_JSON = "replays.json", "problem.json"
MOST_PACE = 1.5
"""At a pace further than this from the usual one, either way, a replay was disturbed: it tells nothing, and is made again."""
Replay = Callable[[Sequence[Workload]], Sequence[Replayed]]
Config = Any
"""A measure.replay.ReplayConfig. (Not imported: training reads replays, and need not run again after a change of measuring.)"""
Made = Sequence[tuple[str, Plan]]
"""Plans with the algorithm that made each; one may have several."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """The replays of a problem: plans and costs by the plans' digests, and which algorithms made which."""

    problem: Problem
    setting: Setting
    made: tuple[tuple[str, str], ...]
    plans: Mapping[str, Plan]
    costs: Mapping[str, Replayed]


def _is_disturbed(cost: Replayed) -> bool:
    return max(cost.pace, 1 / cost.pace) > MOST_PACE


def plan_digest(plan: Plan, problem: Problem) -> str:
    """Of what it places where, whoever made it."""
    return files.digest(files.plan_to_json(plan, problem)["placements"])


def keep(folder: Path, problem: Problem, made: Made, setting: Setting, config: Config, replay: Replay) -> Kept:
    """The replays of these plans: those that `folder` has, or made now by `replay` and kept there instead of what it had. Equal
    plans run once. Raises what `lower` and `replay` raise."""
    names = tuple((algorithm, plan_digest(plan, problem)) for algorithm, plan in made)
    plans = {name: plan for (_, name), (_, plan) in zip(names, made, strict=True)}
    if folder.is_symlink():
        raise ShardCoreError(f"{folder} is a symbolic link; replays are kept in a folder of their own")
    if is_kept(folder, problem, made, setting, config):
        return read(folder)
    costs = dict(zip(plans, replay([lower(plan, problem) for plan in plans.values()]), strict=True))
    _clear(folder)
    files.write_problem(folder / PROBLEM_JSON, problem)
    for name, plan in plans.items():
        files.write_plan(folder / f"{name}.json", plan, problem)
    body = {"setting": files.setting_to_json(setting), "config": dataclasses.asdict(config), "measurement_version":
            dataset.MEASUREMENT_VERSION, "replays": [
        {"algorithm": algorithm, "plan": name, "total_ms": costs[name].total_ms, **dataclasses.asdict(costs[name])}
        for algorithm, name in names]}
    files.write_json(folder / REPLAYS_JSON, {"schema": SCHEMA, "version": VERSION, **body, "digest": files.digest(body)})
    return Kept(problem, setting, names, plans, costs)


def _clear(folder: Path) -> None:
    """Remove what `keep` writes, and nothing else."""
    for old in (folder / REPLAYS_JSON, *folder.glob("*.json"), *folder.glob(".*.tmp")):  # that first: see above
        if old.name in (REPLAYS_JSON, PROBLEM_JSON) or files.DIGEST.fullmatch(old.stem) or files.UNFINISHED.fullmatch(old.name):
            old.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove what `keep` writes, and the folder where it holds nothing else. A link is left with all that it leads to."""
    if folder.is_dir() and not folder.is_symlink():
        with suppress(OSError):  # a folder of a plan's name, or something else in it: none of ours
            _clear(folder)
            folder.rmdir()


def is_kept(folder: Path, problem: Problem, made: Made, setting: Setting, config: Config) -> bool:
    """Whether `folder` has the replays of just these plans, made in this way; one that cannot be read has not."""
    try:
        body = _read(folder)
        known = _kept(folder, body)
    except ShardCoreError:
        return False
    names = [(algorithm, plan_digest(plan, problem)) for algorithm, plan in made]
    if not body.is_current or any(_is_disturbed(r.cost()) for r in body.replays):
        return False
    return (known.problem == problem and known.setting == setting
            and body.config == dataclasses.asdict(config) and list(known.made) == names)


def read(folder: Path) -> Kept:
    """Raises ShardCoreError naming the file that is missing, cut short, edited, or of a version that is not known."""
    return _kept(folder, _read(folder))


def _kept(folder: Path, body: _Body) -> Kept:
    """What `body`, from the folder's replays.json, says of the problem and plans beside it."""
    problem = files.read_problem(folder / PROBLEM_JSON)
    for row in body.replays:
        if len(row.waiting_ms) != len(problem.topology):
            raise ShardCoreError(f"{folder / REPLAYS_JSON}: plan {row.plan} has times of {len(row.waiting_ms)} devices; problem "
                                 f"{problem.name!r} has {len(problem.topology)}")
    plans = {name: files.read_plan(folder / f"{name}.json", problem) for name in dict.fromkeys(r.plan for r in body.replays)}
    for name, plan in plans.items():
        if plan_digest(plan, problem) != name:
            raise ShardCoreError(f"{folder / name}.json is not the plan of its name")
    return Kept(problem, body.setting, tuple((r.algorithm, r.plan) for r in body.replays), plans,
                {r.plan: r.cost() for r in body.replays})


def read_all(folder: Path, setting: Setting) -> list[Kept]:
    """The kept replays of a setting in the folders of `folder`, by their names; [] where there are none."""
    return [kept for kept in _read_current(folder) if kept.setting == setting]


def _read_current(folder: Path) -> list[Kept]:
    """Those in the folders of `folder` whose timings mean what they mean today."""
    there = [path.parent for path in sorted(folder.glob(f"*/{REPLAYS_JSON}"))]
    return [_kept(one, body) for one in there if (body := _read(one)).is_current]


def missing(folder: Path, made: Sequence[tuple[Problem, Made]], setting: Setting) -> list[tuple[Problem, list[tuple[str, Plan]]]]:
    """Those of these problems' plans of which a dataset's folder has no replays that were not disturbed; problems that lack none
    are left out."""
    lacks = [(problem, _missing(plans, problem, _known(folder, problem, setting))) for problem, plans in made]
    return [(problem, plans) for problem, plans in lacks if plans]


def _missing(made: Made, problem: Problem, known: Mapping[str, Replayed]) -> list[tuple[str, Plan]]:
    return [(algorithm, plan) for algorithm, plan in made if plan_digest(plan, problem) not in known]


def append(folder: Path, problem: Problem, made: Made, setting: Setting, config: Config,
           replay: Replay) -> dict[str, Replayed]:
    """What these plans take, by their digests: as a dataset's folder has it, in whatever way they were replayed, or replayed now
    and kept there, beside all that it has. Raises as `keep`."""
    known = _known(folder, problem, setting)
    lacks = _missing(made, problem, known)
    if lacks:
        of = [files.problem_to_json(problem), files.setting_to_json(setting), [plan_digest(plan, problem) for _, plan in lacks]]
        where = folder / dataset.REPLAYS / f"{problem.name}-{files.digest(of)[:8]}"
        known |= keep(where, problem, lacks, setting, config, replay).costs
    return known


def _known(folder: Path, problem: Problem, setting: Setting) -> dict[str, Replayed]:
    kept = read_all(folder / dataset.REPLAYS, setting)
    return {name: cost for one in kept if one.problem == problem for name, cost in one.costs.items() if not _is_disturbed(cost)}


def steps(folders: Sequence[Path], setting: Setting) -> list[Step]:
    """What datasets' folders hold of replays of a setting at the usual pace, each plan of a problem once, none of more processes
    than cores and none that was disturbed: for cost/steps.py. Raises as `read`, and where a folder has neither replays nor
    samples of the setting, but replays of others."""
    found: dict[tuple[str, str], Step] = {}
    for folder in folders:
        kept = _read_current(folder / dataset.REPLAYS)
        others = sorted({str(one.setting) for one in kept if one.setting != setting})
        if len(others) and not any(one.setting == setting for one in kept) and setting not in dataset.settings(folder):
            raise ShardCoreError(f"{folder} holds replays for ({'; '.join(others)}), none for ({setting})")
        for one in kept:
            if one.setting == setting:
                which = files.digest(files.problem_to_json(one.problem))
                found |= {(which, name): (lower(plan, one.problem), one.costs[name].at_usual_pace())
                          for name, plan in one.plans.items()
                          if not one.costs[name].oversubscribed and not _is_disturbed(one.costs[name])}
    return list(found.values())


def digests(folder: Path) -> list[str]:
    """Of all that a dataset has of replays."""
    return [_read(path.parent).digest for path in sorted((folder / dataset.REPLAYS).glob(f"*/{REPLAYS_JSON}"))]


def judge(kept: Sequence[Kept], model: CostModel) -> list[Judged]:
    """Every replay, at the usual pace, beside what a model says of its plan."""
    rows = []
    for one in kept:
        predicted = {name: price(lower(plan, one.problem), model).total_ms for name, plan in one.plans.items()}
        costs = {name: cost.at_usual_pace() for name, cost in one.costs.items()}
        rows += [Judged(one.problem.name, algorithm, name, predicted[name], costs[name].total_ms, noise_ms(costs[name].step))
                 for algorithm, name in one.made]
    return rows


def parts(kept: Sequence[Kept], model: CostModel) -> dict[str, float]:
    """How many times as long as predicted each part of all steps took at the usual pace, by its name in StepCost."""
    pairs = [(price(lower(plan, one.problem), model), one.costs[name].at_usual_pace())
             for one in kept for name, plan in one.plans.items()]
    names = [f.name for f in dataclasses.fields(StepCost)]
    said, took = (np.array([[sum(getattr(pair[i], name)) for name in names] for pair in pairs]).sum(0) for i in (0, 1))
    return {name: float(t / s) for name, s, t in zip(names, said, took, strict=True) if s > 0}


def csv_rows(rows: Sequence[Judged]) -> list[dict[str, Any]]:
    return [{k: round(v, 5) if isinstance(v, float) else v for k, v in dataclasses.asdict(r).items()} for r in rows]


@dataclasses.dataclass(frozen=True)
class _Row:
    """A replay in replays.json: who made the plan, its digest, and a Replayed."""

    algorithm: str
    plan: str
    total_ms: float
    forward_compute_ms: tuple[float, ...]
    backward_compute_ms: tuple[float, ...]
    forward_comm_ms: tuple[float, ...]
    backward_comm_ms: tuple[float, ...]
    waiting_ms: tuple[float, ...]
    step: Spread
    oversubscribed: bool
    pace: float = 1.0

    def __post_init__(self) -> None:
        if not files.DIGEST.fullmatch(self.plan):
            raise ShardCoreError(f"a replay is of plan {schema.show(self.plan)}; it needs the 16 hex digits of a digest")
        parts = [getattr(self, f.name) for f in dataclasses.fields(StepCost)]
        if len({len(p) for p in parts}) > 1 or not parts[0] or not all(0 <= ms <= MOST_MS for p in parts for ms in p):
            raise ShardCoreError(f"the replay of plan {self.plan} has parts {schema.show(parts)}; it needs as many times for "
                                 "each, of 0 ms or more")
        if not 1 / MOST_SPEED <= self.pace <= MOST_SPEED:
            raise ShardCoreError(f"the replay of plan {self.plan} has pace {self.pace}; it needs {1 / MOST_SPEED:g} to "
                                 f"{MOST_SPEED:g}")
        usual = self.cost().at_usual_pace()  # whose times are bounded too
        if not (usual.total_ms > 0 and usual.step.median_ms > 0):
            raise ShardCoreError(f"the replay of plan {self.plan} took 0 ms; no step does")

    def cost(self) -> Replayed:
        return Replayed(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Replayed)})


@dataclasses.dataclass(frozen=True)
class _Body:
    """What replays.json holds."""

    setting: Setting
    config: Mapping[str, Any]
    replays: tuple[_Row, ...]
    digest: str
    measurement_version: int = 2

    @property
    def is_current(self) -> bool:
        """Whether its timings mean what they mean today."""
        return self.measurement_version == dataset.MEASUREMENT_VERSION


def _read(folder: Path) -> _Body:
    path = folder / REPLAYS_JSON
    data = schema.read_json(path)
    if not isinstance(data, dict) or (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
        raise ShardCoreError(f"{path} is not {SCHEMA} of version {VERSION}; remove {folder} to replay its plans again")
    body = {k: v for k, v in data.items() if k not in ("schema", "version")}
    if data.get("digest") != files.digest({k: v for k, v in body.items() if k != "digest"}):
        raise ShardCoreError(f"{path} does not match its digest {schema.show(data.get('digest'))}; it was edited after ShardCore "
                             f"wrote it: remove {folder} to replay its plans again")
    return schema.build(_Body, body, str(path))
