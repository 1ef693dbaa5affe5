"""Replays on disk: a folder for each problem, with its plans. Any model can price them, or be trained on them.

  problem.json    as files.write_problem
  <plan>.json     as files.write_plan; named by the digest of its placements
  replays.json    schema shardcore/replays, version 3, sealed by a digest:
                    the setting, the ReplayConfig and STEP_VERSION as measurement_version
                    replays: algorithm (or kind of plan), plan, total_ms and the parts of each

replays.json is written last, so a folder without it holds no replays. Folders of other measurement versions
are ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from shardcore.core.errors import ShardCoreError, Unreachable
from shardcore.core.step_cost import PARTS
from shardcore.core.types import Plan, Problem, Setting
from shardcore.core.validation import MOST_MS, describe_differences, number_within, require, short_repr
from shardcore.io import dataset, files, schema, traced_samples, writing
from shardcore.io.envelope import is_document, read_document, sealed_document
from shardcore.io.measurements import StepSample
from shardcore.step.lower import Workload, lower

SCHEMA = "replays"
STEP_VERSION = 5
"""Version of times of replayed steps, raised by hand when their meaning changes. In 3, ids travel in the step. In 4,
each rank has a core of its own. In 5, ids of divided rows are put in buckets.
"""
REPLAYS_JSON, PROBLEM_JSON = "replays.json", "problem.json"
OVER_HOSTS_VERSION = 7
"""Version of times of steps over several hosts. In 6, their ranks begin together. In 7, all-reduces start
before other exchanges of gradients, and are waited for last.
"""
MOST_SLOWDOWN = 1.5
"""Largest slowdown of a valid replay, and inverse of the least. Others were disturbed, and are run again."""
Replay = Callable[[Sequence[Workload]], Sequence[StepSample]]
Config = Any
"""A measure.replay.ReplayConfig. It is not imported, because training reads replays, and an edit of measuring must not
make training stale.
"""
NamedPlans = Sequence[tuple[str, Plan]]
"""Plans with the algorithms that made them, or with their kinds. An algorithm may have several plans."""


@dataclasses.dataclass(frozen=True)
class ReplaySet:
    """Measured replays of a problem's plans.

    problem: the problem.
    setting: setting in which they ran.
    made: pairs of an algorithm and the digest of a plan that it made.
    plans: plans by digest.
    costs: measured costs by the plan's digest.
    """

    problem: Problem
    setting: Setting
    made: tuple[tuple[str, str], ...]
    plans: Mapping[str, Plan]
    costs: Mapping[str, StepSample]


def _is_disturbed(cost: StepSample) -> bool:
    """Tell if the machine's slowdown during a replay was outside the valid range."""
    return max(cost.slowdown, 1 / cost.slowdown) > MOST_SLOWDOWN


def plan_digest(plan: Plan) -> str:
    """Digest of a plan's placements, without its provenance."""
    return files.json_digest(
        sorted(
            [p.shard.table.name, p.kind, p.shard.col_lo, p.shard.col_hi, list(p.devices)]
            for p in plan.placements
        )
    )


def replay_or_reuse(
    folder: Path, problem: Problem, made: NamedPlans, setting: Setting, config: Config, replay: Replay
) -> ReplaySet:
    """Measured replays of a problem's plans: those stored in `folder` if valid, or new ones by `replay`, which are
    stored.

    New replays overwrite those in the folder. Equal plans run once. Raises what `lower` and `replay` raise.
    """
    names = tuple((algorithm, plan_digest(plan)) for algorithm, plan in made)
    plans = {name: plan for (_, name), (_, plan) in zip(names, made, strict=True)}
    _require_own_folder(folder, (PROBLEM_JSON, REPLAYS_JSON, *(f"{name}.json" for name in plans)))
    if has_valid_replays(folder, problem, made, setting, config):
        return read_replays(folder)
    # All plans in one call, so that their steps alternate and disturbances meet all.
    costs = dict(zip(plans, replay([lower(plan, problem) for plan in plans.values()]), strict=True))
    _remove_replay_files(folder)
    files.write_problem(folder / PROBLEM_JSON, problem)
    for name, plan in plans.items():
        files.write_plan(folder / f"{name}.json", plan, problem)
    body = {
        "setting": files.setting_to_json(setting),
        "config": dataclasses.asdict(config),
        "measurement_version": _current_version(problem),
        "replays": [
            {
                "algorithm": algorithm,
                "plan": name,
                "total_ms": costs[name].total_ms,
                **dataclasses.asdict(costs[name]),
            }
            for algorithm, name in names
        ],
    }
    writing.write_json(folder / REPLAYS_JSON, sealed_document(SCHEMA, body))
    return ReplaySet(problem, setting, names, plans, costs)


def _require_own_folder(folder: Path, names: Sequence[str]) -> None:
    """Raise ShardCoreError for a folder or file that could not be written after replaying."""
    for path in (folder, folder.parent):
        require(
            not path.is_symlink(), f"{path} is a symbolic link; replays are kept in a folder of their own"
        )
    require(
        folder.is_dir() or not folder.exists(), f"{folder} is no folder; replays are kept in one: remove it"
    )
    for path in (folder / name for name in names):
        require(not path.is_dir(), f"{path} is a folder; replays are kept in a file of that name: remove it")


def _remove_replay_files(folder: Path) -> None:
    """Remove the files that `replay_or_reuse` writes to a folder, and no other files."""
    # replays.json goes first: a folder without it holds no replays.
    for old in (folder / REPLAYS_JSON, *(folder / name for name in schema.list_names(folder))):
        if _is_replay_file(old):
            old.unlink(missing_ok=True)


def _is_replay_file(path: Path) -> bool:
    """Tell if `replay_or_reuse` wrote a file: judged by the name, and for a file of a plan by its schema, too."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.suffix == ".json" and files.DIGEST.fullmatch(path.stem):
        return is_document(path, "plan")
    return path.name in (REPLAYS_JSON, PROBLEM_JSON) or bool(writing.UNFINISHED.fullmatch(path.name))


def remove_replays(folder: Path) -> None:
    """Remove the replay files in a folder, then the folder if empty. Links are left alone."""
    if folder.is_dir() and not folder.is_symlink():
        with suppress(OSError, ShardCoreError):
            _remove_replay_files(folder)
            folder.rmdir()


def has_valid_replays(
    folder: Path, problem: Problem, made: NamedPlans, setting: Setting, config: Config
) -> bool:
    """Tell if a folder has undisturbed, readable replays of exactly these plans with this config."""
    try:
        body = _read_body(folder)
        known = _load_replay_set(folder, body)
    except ShardCoreError:
        return False
    names = [(algorithm, plan_digest(plan)) for algorithm, plan in made]
    return (
        body.measurement_version == _current_version(problem)
        and not any(_is_disturbed(r.cost) for r in body.replays)
        and known.problem == problem
        and known.setting == setting
        and body.config == dataclasses.asdict(config)
        and list(known.made) == names
    )


def read_replays(folder: Path) -> ReplaySet:
    """Read the measured replays of a problem's plans from a folder.

    Raises ShardCoreError naming a file that is missing, damaged, edited, or of an unknown version.
    """
    return _load_replay_set(folder, _read_body(folder))


def _load_replay_set(folder: Path, body: _Body) -> ReplaySet:
    """Replays of a parsed replays.json, with the problem and plans of its folder."""
    problem = files.read_problem(folder / PROBLEM_JSON)
    for row in body.replays:
        require(
            len(row.cost.waiting_ms) == len(problem.topology),
            f"{folder / REPLAYS_JSON}: plan {row.plan} has times of "
            f"{len(row.cost.waiting_ms)} devices; problem {problem.name!r} has "
            f"{len(problem.topology)}",
        )
    names = dict.fromkeys(r.plan for r in body.replays)
    plans = {name: files.read_plan(folder / f"{name}.json", problem) for name in names}
    for name, plan in plans.items():
        # A plan under another's name would be paired with the other's times.
        require(plan_digest(plan) == name, f"{folder / name}.json is not the plan of its name")
    return ReplaySet(
        problem,
        body.setting,
        tuple((r.algorithm, r.plan) for r in body.replays),
        plans,
        {r.plan: r.cost for r in body.replays},
    )


def read_all_replays(folder: Path, setting: Setting) -> list[ReplaySet]:
    """Read the replays of a setting from the subfolders of `folder`, sorted by name."""
    return [kept for kept in _read_current_replays(folder) if kept.setting == setting]


def _read_current_replays(folder: Path) -> list[ReplaySet]:
    """Read the replays that have the current measurement version from the subfolders of `folder`."""
    return [
        _load_replay_set(one, body)
        for one in _replay_folders(folder)
        if (body := _read_body(one)).measurement_version
        == _current_version(files.read_problem(one / PROBLEM_JSON))
    ]


def _current_version(problem: Problem) -> int:
    """Current measurement version of replayed steps of a problem."""
    return STEP_VERSION if len(problem.topology.hosts) == 1 else OVER_HOSTS_VERSION


def _replay_folders(folder: Path) -> list[Path]:
    """Subfolders that have replays, sorted by name. Raises Unreachable for a folder that cannot be read."""
    return [
        folder / name
        for name in schema.list_names(folder)
        if REPLAYS_JSON in schema.list_names(folder / name)
    ]


def plans_without_replay(
    folder: Path, wanted: Sequence[tuple[Problem, NamedPlans]], setting: Setting
) -> list[tuple[Problem, list[tuple[str, Plan]]]]:
    """Plans, by problem, that have no undisturbed replay in a dataset's folder."""
    lacking = [
        (problem, _unreplayed_plans(_valid_replays(folder, problem, setting), plans))
        for problem, plans in wanted
    ]
    return [(problem, plans) for problem, plans in lacking if plans]


def _unreplayed_plans(known: Mapping[str, StepSample], plans: NamedPlans) -> list[tuple[str, Plan]]:
    """Named plans that are not among the known replays."""
    return [(algorithm, plan) for algorithm, plan in plans if plan_digest(plan) not in known]


def add_missing_replays(
    folder: Path, problem: Problem, made: NamedPlans, setting: Setting, config: Config, replay: Replay
) -> dict[str, StepSample]:
    """Replays of a problem's plans by plan digest: from a dataset's folder, or measured now and added to the dataset.

    Replays in the folder count whatever their config. Raises as `replay_or_reuse` does.
    """
    known = _valid_replays(folder, problem, setting)
    if lacking := _unreplayed_plans(known, made):
        identity = [
            files.problem_to_json(problem),
            files.setting_to_json(setting),
            [plan_digest(plan) for _, plan in lacking],
        ]
        # A folder of its own, so that no existing replays are overwritten.
        where = folder / dataset.REPLAYS / f"{problem.name}-{files.json_digest(identity)[:8]}"
        known |= replay_or_reuse(where, problem, lacking, setting, config, replay).costs
    return known


def dataset_digest(folder: Path) -> str:
    """Digest of the content of a dataset's folder.

    File names hold digests of their content, which are checked when files are read. Replays and traced
    samples hold theirs inside.
    """
    parts = sorted(p.name for p in folder.iterdir() if p.suffix in (".parquet", ".json"))
    return files.json_digest([*parts, *replay_digests(folder), *traced_samples.traced_digests(folder)])


def datasets_digest(folders: Sequence[Path]) -> str:
    """Digest of the content of several dataset folders."""
    return files.json_digest(sorted(map(dataset_digest, folders)))


def _valid_replays(folder: Path, problem: Problem, setting: Setting) -> dict[str, StepSample]:
    """Undisturbed replays of a problem in a dataset's folder, by plan digest."""
    known: dict[str, StepSample] = {}
    for where in _replay_folders(folder / dataset.REPLAYS):
        # Damaged replays do not count. If they are of this problem, they are run again.
        with suppress(ShardCoreError):
            body = _read_body(where)
            kept = _load_replay_set(where, body)
            is_current = body.measurement_version == _current_version(kept.problem)
            if is_current and kept.setting == setting and kept.problem == problem:
                known |= {name: cost for name, cost in kept.costs.items() if not _is_disturbed(cost)}
    return known


def read_step_samples(folders: Sequence[Path], setting: Setting) -> list[tuple[Workload, StepSample]]:
    """Replays of a setting in dataset folders, as pairs of workload and times at the machine's usual speed.

    Each plan of a problem appears once. Replays that were disturbed, or had more processes than cores, are
    left out.

    Raises as `read_replays` does. Also raises ShardCoreError if a folder has replays only of other settings, and no
    samples of this one.
    """
    pairs: dict[tuple[str, str], tuple[Workload, StepSample]] = {}
    for folder in folders:
        kept = _read_current_replays(folder / dataset.REPLAYS)
        found = {one.setting for one in kept}
        # The user probably named such a folder by mistake.
        require(
            not found or setting in found or setting in dataset.dataset_settings(folder),
            f"{folder} holds replays of other settings than asked for: "
            f"{'; '.join(sorted(describe_differences(other, setting) for other in found))}",
        )
        for one in kept:
            if one.setting == setting:
                problem = files.problem_digest(one.problem)
                pairs |= {
                    (problem, name): (lower(plan, one.problem, fits=False), one.costs[name].at_usual_speed())
                    for name, plan in one.plans.items()
                    if not one.costs[name].oversubscribed and not _is_disturbed(one.costs[name])
                }
    return list(pairs.values())


def replay_digests(folder: Path) -> list[str]:
    """Digests of all replay files in a dataset's folder."""
    return [_read_body(one).digest for one in _replay_folders(folder / dataset.REPLAYS)]


@dataclasses.dataclass(frozen=True)
class _Row:
    """One plan's replay in replays.json."""

    algorithm: str
    plan: Annotated[str, files.require_digest]
    total_ms: float
    cost: StepSample

    def __post_init__(self) -> None:
        cost, what = self.cost, f"the replay of plan {self.plan}"
        parts = [getattr(cost, name) for name in PARTS]
        require(
            len(parts[0]) > 0
            and len(set(map(len, parts))) == 1
            and all(0 <= ms <= MOST_MS for part in parts for ms in part),
            f"{what} has parts {short_repr(parts)}; it needs as many times for each, of 0 ms or more",
        )
        number_within(0, MOST_MS)(cost.dense_ms, what, "dense_ms")
        require(
            math.isclose(self.total_ms, cost.total_ms, rel_tol=1e-9),
            f"{what} has total_ms {self.total_ms}; its parts sum to {cost.total_ms}",
        )
        # This also checks its times.
        usual = cost.at_usual_speed()
        require(usual.total_ms > 0 and usual.step.median_ms > 0, f"{what} took 0 ms; no step does")


@dataclasses.dataclass(frozen=True)
class _Body:
    """JSON content of replays.json."""

    setting: Setting
    config: Mapping[str, Any]
    measurement_version: int
    digest: str
    replays: tuple[_Row, ...]

    def __post_init__(self) -> None:
        costs = {row.plan: row.cost for row in self.replays}
        for row in self.replays:
            require(
                row.cost == costs[row.plan],
                f"plan {row.plan} has two replays of different times; it needs one",
            )


def _read_body(folder: Path) -> _Body:
    """Read and check replays.json in a folder."""
    path = folder / REPLAYS_JSON
    try:
        body = read_document(path, SCHEMA)
    except Unreachable:  # nothing is wrong with the file
        raise
    except ShardCoreError as error:
        raise type(error)(f"{error}; remove {folder} to replay its plans again") from None
    digest = files.json_digest(body)
    rows = schema.convert_value(body.pop("replays", None), tuple[Mapping[str, Any], ...], f"{path}: replays")
    replays = tuple(_parse_row(row, f"{path}: replays[{i}]") for i, row in enumerate(rows))
    return schema.build_record(_Body, body, str(path), digest=digest, replays=replays)


def _parse_row(row: Mapping[str, Any], what: str) -> _Row:
    """Parse a JSON object of replays.json into a Replay."""
    head = {k: v for k, v in row.items() if k in ("algorithm", "plan", "total_ms")}
    cost = {k: v for k, v in row.items() if k not in head}
    return schema.build_record(
        _Row, head, what, cost=schema.build_record(StepSample, cost, what, extra_keys=tuple(head))
    )
