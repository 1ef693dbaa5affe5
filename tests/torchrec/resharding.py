"""Jobs on gloo processes whose tables move, for the tests: what each rank found, as JSON."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))

import hot_cold_training as hot_cold
import reshard_jobs as jobs
import training
import wrapped_training as wrapped
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from shardcore.core.errors import ShardCoreError
from shardcore.io.files import problem_digest
from shardcore.plans import followed, store
from shardcore.plans.decisions import Decision
from shardcore.plans.followed import StoredPlans
from shardcore.tables.hot_rows import with_hot_rows
from shardcore.torchrec.modules import collections_of_model
from shardcore.torchrec.moves import follow as following
from shardcore.torchrec.moves import reshard as moving
from shardcore.torchrec.moves.agreement import time_limit
from shardcore.torchrec.moves.checkpoints import load_rows, save_rows
from shardcore.torchrec.moves.follow import FollowConfig, PlanFollower
from shardcore.torchrec.moves.reshard import MoveConfig, reshard
from shardcore.torchrec.moves.rows import DenseOptimizer, parts_on_rank
from shardcore.torchrec.moves.transfer import Exchange
from shardcore.torchrec.plan_files import plan_from_json
from shardcore.torchrec.sharding_plan import to_torchrec

QUICK = MoveConfig(piece_mib=2**-10, timeout_s=30)


def in_processes(hosts: int, per_host: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run work(rank, problem, folder, *args) on each rank (see `training.on_ranks`)."""
    return training.on_ranks(jobs.problem(hosts, per_host), work, *args, limit_s=150)


def move_and_compare(
    rank: int, given: Any, folder: str, seeds: list[tuple[int, str]], steps: int
) -> list[Any]:
    """Difference from a job that never moved, and tables that moved, for each pair of plans."""
    found = []
    for seed, optimizer in seeds:
        settings = jobs.Settings(optimizer, seed=seed)
        before, after = jobs.pair(given, optimizer, np.random.default_rng([7, seed]))
        moved, still = (jobs.Job.of(given, before, settings) for _ in range(2))
        for step in range(2 * steps):
            if step == steps:
                made = reshard(moved.model, moved.exported(after), moved.optimizer, config=QUICK)
            moved.train(step)
            still.train(step)
        found.append(
            {
                "apart": jobs.apart(moved.whole(), still.whole()),
                "tables": made.tables,
                "plan": moving.plan_to_json(moved.model.plan) == moving.plan_to_json(moved.exported(after)),
                "digests": len(made.digests),
            }
        )
    return found


def save_and_load(rank: int, given: Any, folder: str, optimizer: str) -> dict[str, Any]:
    """Rows of a job loaded into another plan: the difference, and what is refused."""
    before, after = jobs.pair(given, optimizer, np.random.default_rng([7, 8]))
    job = jobs.Job.of(given, before, jobs.Settings(optimizer))
    job.train(0)
    save_rows(job.model, f"{folder}/rows", job.optimizer)
    other = jobs.Job.of(given, after, jobs.Settings(optimizer, seed=1))
    load_rows(other.model, f"{folder}/rows", other.optimizer)
    found: dict[str, Any] = {"apart": jobs.apart(job.whole(), other.whole())}
    try:
        load_rows(other.model, f"{folder}/rows")
    except ShardCoreError as error:
        found["no optimizer"] = str(error)
    return found


def save(rank: int, given: Any, folder: str, path: str, optimizer: str) -> float:
    """Rows of a job, saved for one of another number of ranks. A number that follows from them."""
    before, _ = jobs.pair(given, optimizer, np.random.default_rng([7, 5]))
    job = jobs.Job.of(given, before, jobs.Settings(optimizer))
    job.train(0)
    save_rows(job.model, path, job.optimizer)
    return _number_of(job)


def load(rank: int, given: Any, folder: str, path: str, optimizer: str) -> float:
    """The number of a job that loads those rows."""
    _, after = jobs.pair(given, optimizer, np.random.default_rng([7, 5]))
    job = jobs.Job.of(given, after, jobs.Settings(optimizer, seed=1))
    load_rows(job.model, path, job.optimizer)
    return _number_of(job)


def _number_of(job: Any) -> float:
    """A sum that changes with the place of each row and number of state."""
    return sum(
        float((values.double() * torch.arange(1, values.numel() + 1).view_as(values)).sum())
        for _, values in sorted(job.whole().items())
    )


def move_both(rank: int, given: Any, folder: str, seeds: list[tuple[int, str]], steps: int) -> list[Any]:
    """Jobs that move, with and without a pipeline."""
    return [move_and_compare(rank, given, folder, seeds, steps), move_a_pipeline(rank, given, folder)]


def refusals(rank: int, given: Any, folder: str, waits: bool) -> dict[str, str]:
    """The refusal of each move that cannot be made. After each the job is as before, and at last it moves.

    waits: moves are made too for which one rank waits in vain.
    """
    before, after = jobs.pair(given, "EXACT_ADAGRAD", np.random.default_rng([7, 1]))
    job = jobs.Job.of(given, before, jobs.Settings("EXACT_ADAGRAD"))
    for step in range(2):
        job.train(step)
    new, old, whole = job.exported(after), job.exported(before), job.whole()
    found = {}

    def refused(
        name: str,
        plan: Any = new,
        optimizer: Any = job.optimizer,
        config: Any = QUICK,
        model: Any = job.model,
        **others: Any,
    ):
        try:
            reshard(model, plan, optimizer, config=config, **others)
            found[name] = "it moved"
        except ShardCoreError as error:
            found[name] = str(error)
        if jobs.apart(job.whole(), whole) or moving.plan_to_json(job.model.plan) != moving.plan_to_json(old):
            found[name] += ", and the job is not as it was"

    refused("other plan on rank 1", old if rank else new)
    without = job.exported(after)
    del without.plan["inner.right"]
    refused("another model", without)
    refused("no room", config=MoveConfig(max_gib=0.0))
    refused("no optimizer", optimizer=None)
    refused("no plan", plan="new.json")
    refused("another optimizer", optimizer=[job.optimizer])
    refused("another pipeline", pipeline=object())
    groups_of_ranks = DMPCollection.__new__(DMPCollection)  # it asserts GPUs when it is made
    torch.nn.Module.__init__(groups_of_ranks)
    refused("groups of ranks", model=groups_of_ranks)
    with mock.patch("torchrec.__version__", "2.0.0"):
        refused("another TorchRec")
    job.model._moves_tables = True
    refused("a second move")
    job.model._moves_tables = False
    groups = len(dist.distributed_c10d._world.pg_map)
    # On all ranks: one that fails alone may break the job's group, in which TorchRec builds.
    with mock.patch.object(
        moving._OldCollection, "build_new_shards", side_effect=OSError("no new shards here")
    ):
        refused("ranks that cannot build")
    if len(dist.distributed_c10d._world.pg_map) != groups:
        found["ranks that cannot build"] = "a process group is left"
    write = Exchange._write_piece

    def fail(self: Any, piece: Any, value: torch.Tensor) -> None:
        if rank == 1:
            raise OSError("the memory of this rank is broken")
        write(self, piece, value)

    if waits:
        with mock.patch.object(Exchange, "_write_piece", fail):
            refused("a rank that fails", config=MoveConfig(piece_mib=2**-10, timeout_s=1))

    def alter(self: Any, piece: Any, value: torch.Tensor) -> None:
        write(self, piece, value + 2.0**-10 if rank == 1 and piece.name == "sum" else value)

    with mock.patch.object(Exchange, "_write_piece", alter):
        refused("other rows")
    if waits:
        if rank == 1:
            time.sleep(3)
        refused("a rank that comes late", config=MoveConfig(timeout_s=0.1))
    moved = reshard(job.model, new, job.optimizer, config=QUICK)
    found["at last"] = f"moved {len(moved.tables)} tables, {jobs.apart(job.whole(), whole)} apart"
    return found


def move_hot_cold(rank: int, given: Any, folder: str) -> list[Any]:
    """Cold rows of a HotColdEmbeddingCollection move. Tables, and differences from a job that never moved."""
    hot, on = hot_cold.HOT, hot_cold.problem(1, 2)
    of = with_hot_rows(on, {name: len(ids) for name, ids in hot.items()})
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        model = hot_cold.sharded(hot, on, False, "EXACT_ADAGRAD")
        for part in (p for c in collections_of_model(model) for p in parts_on_rank(c, DenseOptimizer())):
            part.tensors["weights"].copy_(jobs._weights(part, jobs.Settings()))
        dense = [p for name, p in in_backward_optimizer_filter(model.named_parameters())]
        for i, weight in enumerate(dense):
            torch.nn.init.constant_(weight, 0.1 * (i + 1))
        made.append((model, hot_cold.dense_optimizer(dense, "EXACT_ADAGRAD")))
    new = to_torchrec(hot_cold.plan(of, True), of, hot_cold.Model(hot, "meta"), "cpu")
    outputs = []
    for step in range(6):
        if step == 3:
            moved = reshard(made[0][0], new, made[0][1], config=QUICK)
        found = []
        for model, optimizer in made:
            optimizer.zero_grad()
            output = model(hot_cold.batch(10 * step + rank))
            ((output - 1) ** 2).sum().backward()
            optimizer.step()
            found.append(output.detach())
        outputs.append(float((found[0] - found[1]).abs().max()))
    return [list(moved.tables), outputs]


def move_beside_wrapped(rank: int, given: Any, folder: str) -> list[str]:
    """Plain collections move beside wrapped ones. The refusal of plans that move those."""

    def plan_of(plain: str) -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = wrapped.Model()
        # Managed collision is sharded by row only.
        asked = {name: [plain] for name in "ab"} | {name: ["table_wise"] for name in "cd"}
        asked |= {name: ["row_wise"] for name in "eg"}
        return model, wrapped.planner(2, asked).collective_plan(model, wrapped.sharders())

    models = []
    for _ in range(2):
        model, plan = plan_of("table_wise")
        sharded = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=wrapped.sharders()
        )
        wrapped._copy_tables(sharded, plan_of("table_wise")[0])
        models.append(sharded)
    found = []

    def move(new: Any) -> None:
        try:
            found.append(" ".join(reshard(models[0], new, config=QUICK).tables))
        except ShardCoreError as error:
            found.append(str(error))

    new = plan_of("row_wise")[1]
    for path in ("processed", "collided", "collided_rows"):
        new.plan[path] = models[0].plan.plan[path]
    move(new)
    shardings = {name: s for sharding in new.plan.values() for name, s in sharding.items()}
    # All tables have one shape, so that each may have the sharding of another.
    for path, table, other in (("processed", "c", "e"), ("collided", "e", "c"), ("collided_rows", "g", "c")):
        changed = plan_from_json(moving.plan_to_json(new))
        changed.plan[path][table] = shardings[other]
        move(changed)
    one, other = (model(*wrapped.batch(rank)) for model in models)
    found.append(str(max(float((x - y).abs().max()) for x, y in zip(one[:2], other[:2], strict=True))))
    return found


def move_a_pipeline(rank: int, given: Any, folder: str) -> list[float]:
    """Losses' difference of each step from a pipeline that never moved."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    settings = jobs.Settings("EXACT_SGD", seed=2)
    before, after = jobs.pair(given, "EXACT_SGD", np.random.default_rng([7, 2]))
    pipelines, found = [], []
    for _ in range(2):
        job = jobs.Job.of(given, before, settings)
        pipeline = TrainPipelineSparseDist(job.model, job.optimizer, torch.device("cpu"))
        pipelines.append((job, pipeline, iter([jobs.batch(settings, step) for step in range(6)])))
    for step in range(6):
        # At step 5 one batch is left in the pipeline.
        if step in (2, 5):
            job, pipeline, _ = pipelines[0]
            reshard(job.model, job.exported(after if step == 2 else before), job.optimizer, pipeline, QUICK)
        one, other = (pipeline.progress(batches) for _, pipeline, batches in pipelines)
        found.append(float((one - other).abs().max()))
    return found


def lose_row_state(rank: int, given: Any, folder: str) -> dict[str, Any]:
    """A table under row-wise Adagrad is cut by columns: refused, and then moved approximately and back."""
    whole, cut = (
        jobs.Plan(
            tuple(
                jobs.Placement("column", jobs.Shard(t, 0, t.rows, lo, hi), (d,))
                for t in given.tables
                for d, lo, hi in ([(0, 0, 4), (1, 4, t.dim)] if is_cut and t.name == "a" else [(0, 0, t.dim)])
            )
        )
        for is_cut in (False, True)
    )
    job = jobs.Job.of(given, whole, jobs.Settings("EXACT_ROWWISE_ADAGRAD"))
    job.train(0)
    before = job.whole()
    try:
        reshard(job.model, job.exported(cut), job.optimizer, config=QUICK)
        refused = ""
    except ShardCoreError as error:
        refused = str(error)
    loose = MoveConfig(piece_mib=2**-10, timeout_s=30, approximate=True)
    there = reshard(job.model, job.exported(cut), job.optimizer, config=loose)
    back = reshard(job.model, job.exported(whole), job.optimizer, config=loose)
    return {
        "refused": refused,
        "inexact": [dict(there.inexact), dict(back.inexact)],
        "apart": jobs.apart(job.whole(), before),
    }


def follow(
    rank: int, given: Any, folder: str, root: str, new_s: float, can_return: bool = True
) -> dict[str, Any]:
    """A job follows a store: its own plan, then another, under which a step takes so long by the job's clock.

    can_return: False to refuse the move back.

    The store's last decision, and the job's events.
    """
    clock = [0.0]
    before, after = jobs.pair(given, "EXACT_SGD", np.random.default_rng([7, 2]))
    job = jobs.Job.of(given, before, jobs.Settings("EXACT_SGD"))
    still = jobs.Job.of(given, before, jobs.Settings("EXACT_SGD"))
    config = FollowConfig(every_steps=2, measured_steps=3, move=QUICK)
    follower = PlanFollower(job.model, StoredPlans(root, given.name), job.optimizer, config=config)
    own = moving.plan_to_json(job.model.plan)
    if rank == 0:
        _publish(root, given, before, None)
    dist.barrier()
    events = []
    with mock.patch.object(following.time, "perf_counter", side_effect=lambda: clock[0]):
        for step in range(10):
            if step == 3 and rank == 0:
                _publish(root, given, after, 9.0)
            job.train(step)
            still.train(step)
            is_own = moving.plan_to_json(job.model.plan) == own
            clock[0] += (0.010 if is_own else new_s) * (1 + 0.01 * (step % 2))
            if (event := follower.step()) is not None:
                events.append(event.outcome)
                if not can_return:
                    config = replace(QUICK, max_gib=0.0)
                    follower.config = replace(follower.config, move=config)
    return {
        "events": events,
        "reason": follower.events[-1].reason,
        "apart": jobs.apart(job.whole(), still.whole()),
        "own plan": moving.plan_to_json(job.model.plan) == own,
        "decision": store.last_decision(root, given.name).outcome,
        "report": [asdict(x) for x in followed.read_reports(root, given.name)],
        "versions": sorted(
            d.current for d in store.decision_history(root, given.name) if d.outcome == "first"
        ),
    }


def _publish(root: str, given: Any, plan: Any, ms: float | None) -> None:
    """ms: of a step under the plan; 10 under the one before."""
    last = store.last_decision(root, given.name)
    version = store.add_version(root, given, plan, {"total_ms": ms or 10.0})
    store.record_decision(
        root,
        Decision(
            problem=given.name,
            outcome="first" if last is None else "better",
            reason="of a test",
            current=version,
            candidate=version,
            problem_digest=problem_digest(given),
            candidate_ms=ms or 10.0,
            previous_ms=None if last is None else 10.0,
            margin_ms=None if last is None else 0.5,
            parent=last and last.id,
        ),
    )


def wait_alone(rank: int, given: Any, folder: str) -> dict[str, Any]:
    """Rank 0 makes a group of ranks, and the other does not. Seconds, and the limits of groups afterwards."""
    own, start = dist.group.WORLD, time.monotonic()
    before = own._get_backend(torch.device("cpu")).options._timeout
    error = ""
    with time_limit(own, 20):
        both = dist.new_group([0, 1])
    with time_limit(own, 1):
        try:
            if rank == 0:
                dist.new_group([0, 1])
        except RuntimeError as e:
            error = type(e).__name__
    seconds = time.monotonic() - start
    if rank:
        time.sleep(8)  # rank 0 must not learn that this one is gone
    limits = [g._get_backend(torch.device("cpu")).options._timeout == before for g in (own, both)]
    return {"seconds": seconds, "error": error, "limits": limits, "call": dist.new_group.__name__}


def die(rank: int, given: Any, folder: str, after_s: float) -> dict[str, Any]:
    """Rank 1 dies at an instant of a move. The plan of the other, and whether its rows are what they were."""
    before, after = jobs.pair(given, "EXACT_ADAGRAD", np.random.default_rng([7, 3]))
    job = jobs.Job.of(given, before, jobs.Settings("EXACT_ADAGRAD"))
    job.train(0)
    plans = {"old": job.exported(before), "new": job.exported(after)}
    whole = job.whole()
    dist.barrier()
    if rank == 1:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    start, error = time.monotonic(), ""
    try:
        reshard(job.model, plans["new"], job.optimizer, config=MoveConfig(piece_mib=2**-12, timeout_s=3))
    except ShardCoreError as e:
        error = str(e)
    plan = next(
        (n for n, p in plans.items() if moving.plan_to_json(p) == moving.plan_to_json(job.model.plan)),
        "a mixture",
    )
    return {
        "plan": plan,
        "rows": job.has_rows_of(whole),
        "error": error,
        "seconds": time.monotonic() - start,
    }
