import dataclasses
import json
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shapes import ACROSS, column, host_row, on_hosts, replica, row

import shardcore.measure.replay as module
from shardcore.cli import main
from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.step_cost import PARTS, StepCost
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.io import files
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import exchanges, local_ranks, own_core
from shardcore.measure.collectives import CollectiveConfig, Rank
from shardcore.measure.hosts import HOST_VARIABLE
from shardcore.measure.kernels import KernelBench
from shardcore.measure.replay import ReplayConfig, combine_marks, combine_workload_costs, replay, replay_all
from shardcore.measure.timing import HardwareCaches
from shardcore.step.kinds import SHARDING_KINDS
from shardcore.step.lower import lower

MIB = 1 << 20
SETTING = Setting("test", 240)
CONFIG = ReplayConfig(repeats=4, warmups=2, batches=2, arena_bytes=8 * MIB, evict_bytes=MIB, timeout_s=60)
JOB = Job()
COLD = Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)
TABLES = (
    Table("cold", 50_000, 16, 4.0, COLD),
    Table("hot", 3_000, 32, 20.0, COLD),
    Table("wide", 2_000, 64, 2.5, COLD),
    Table("zipf", 10_000, 8, 10.0, Zipf(1.1), collection="users"),
    Table("one", 1, 4, 1.0, Zipf(0.0), collection="users"),
)


def problem_of(tables, devices) -> Problem:
    return Problem("replayed", tables, Topology((Device(64 * MIB),) * devices), SETTING.batch)


def whole(problem):
    """Whole tables, round-robin."""
    devices = len(problem.topology)
    return lower(
        Plan(
            tuple(Placement("column", Shard.whole(t), (i % devices,)) for i, t in enumerate(problem.tables))
        ),
        problem,
    )


def mixed_plan(problem) -> Plan:
    """Whole, cut, divided and replicated tables; with three devices all-to-alls are uneven."""
    cold, hot, wide, *rest = problem.tables
    last = len(problem.topology) - 1
    return Plan(
        (
            row(cold, problem.topology),
            column(hot, 0, 0, 12),
            column(hot, last, 12),
            replica(wide, problem.topology),
            *(column(t, 0) for t in rest),
        )
    )


# --- a gang of three ----------------------------------------------------------------------------------------


def lopsided(devices):
    """All on the first device: tens of ms of work, more than a scheduler's slices."""
    heavy = Table("heavy", 20_000, 64, 2_000.0, Zipf(0.5))
    return lower(Plan((Placement("column", Shard.whole(heavy), (0,)),)), problem_of((heavy,), devices))


def _told(rank, init_method, send, workloads, reference):
    """Replay as a rank of replay_all's gang, and send what it sent and received in the last step of each workload."""
    made, saw = [], {}

    def told(tensors):
        return {
            f"{run.name} {run.collection}".strip(): x.detach().flatten().numpy().copy()
            for run, x in tensors.items()
        }

    class Told(module._Step):
        """A step whose buffers tell rank and position. (What it pools tells them by itself: rows of weights
        differ.)"""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

        def run_once(self, batch):
            # of one channel each, on one host
            chains = {kind: chain[0] for kind, chain in self._chains.items()}
            buffers = {kind: x.gradients for kind, x in chains.items()}
            for k, sent in enumerate(buffers.values()):
                sent.copy_((rank + 1 + 10 * k + torch.arange(sent.numel()) / 1e4).view(sent.shape))
            sent = told(buffers)
            marks = super().run_once(batch)
            dense = {kind: buffers[kind] for kind in chains if kind.dense_gradient}
            saw[self] = (
                sent,
                told({**self._compute.gradients, **dense}),
                told(self._compute.outputs),
                told({kind: x.arrived for kind, x in chains.items() if kind not in dense}),
            )
            return marks

    module._Step = Told
    send(
        (
            module.replay_rank(rank, init_method, workloads, SETTING, CONFIG, reference=reference),
            [saw[step] for step in made],
        )
    )


@pytest.fixture(scope="module")
def three():
    """Workloads of three devices, their reference op, and what each rank of a gang that replays them
    says."""
    problem = problem_of(TABLES, 3)
    workloads = [whole(problem), lower(mixed_plan(problem), problem), lopsided(3)]
    reference = (ComputeRequest((Shard.whole(TABLES[1]),), SETTING.batch), 1.0)
    last = dict(local_ranks.run_ranks("replay", _told, 3, (workloads, reference), 60.0))
    return workloads, reference, [last[rank] for rank in range(3)]


def test_all_parts_of_all_plans_are_measured(three):
    workloads, reference, output = three
    costs = combine_workload_costs([rank for rank, _ in output], reference, JOB)
    for workload, cost in zip(workloads, costs, strict=True):
        for part in PARTS[:4]:
            for device, value in enumerate(getattr(cost, part)):
                assert value > 0 or ("compute" in part and not workload.ops[device] and value >= 0)
        assert min(cost.waiting_ms) >= 0 < min(cost.input_ms)
        assert cost.total_ms == max(sum(getattr(cost, p)[d] for p in PARTS) for d in range(3))
        assert (
            0 < cost.step.q1_ms <= cost.step.median_ms <= cost.step.q3_ms
            and cost.step.repeats == CONFIG.repeats
        )
        assert cost.slowdown == pytest.approx(np.mean([np.median(ms) for (_, ms), _ in output]))
    assert all(len(ms) == CONFIG.repeats and min(ms) > 0 for (_, ms), _ in output)
    assert not processes()


def test_a_replay_agrees_with_a_price_on_who_computes_and_who_waits(three):
    """All shards are on the first device: only it computes, and the others wait for it.

    The least time of each device counts, as other work may disturb some steps.
    """
    workloads, _, output = three
    says = price(workloads[2], AnalyticModel(SETTING))
    took = [combine_marks([marks[2][[r]] for (marks, _), _ in output], JOB) for r in range(CONFIG.repeats)]
    least = [min(step.compute_ms[device] for step in took) for device in range(3)]
    assert says.compute_ms[1:] == (0, 0) and max(least[1:]) < 0.1 * least[0]
    assert says.waiting_ms[0] == 0 < min(says.waiting_ms[1:])
    assert min(step.waiting_ms[0] for step in took) < max(min(step.waiting_ms[1:]) for step in took)
    for part in PARTS:
        assert all(len(getattr(cost, part)) == 3 for cost in (says, *took))


def split(flat, sizes):
    return np.split(flat, np.cumsum(sizes)[:-1])


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ["whole", "mixed", "lopsided"])
def test_every_collective_of_a_step_delivers_what_the_plan_says(three, which):
    """With 80 of 240 rows a rank: all-to-alls of what each has of whole rows, a reduce-scatter and an
    all-gather of what is divided, and an all-reduce of what is replicated."""
    workloads, _, output = three
    n = ["whole", "mixed", "lopsided"].index(which)
    sent, received, outputs, arrived = zip(*(saw[n] for _, saw in output), strict=True)
    runs = {"column": "", "column users": "users"} if which != "lopsided" else {"column": ""}
    columns = {
        run: [
            sum(
                s.width
                for op in ops
                if op.kind == "column" and op.sharding_kind.collection == name
                for s in op.shards
            )
            for ops in workloads[n].ops
        ]
        for run, name in runs.items()
    }
    for rank in range(3):
        for run, of in columns.items():
            to_rank = [split(sent[d][run], [80 * w for w in of])[rank] for d in range(3)]
            if run in received[rank]:
                same(received[rank][run], np.concatenate(to_rank))
            of_rank = [split(outputs[d][run], [80 * of[d]] * 3)[rank] for d in range(3) if of[d]]
            same(arrived[rank][run], np.concatenate(of_rank))
        if which == "mixed":
            same(received[rank]["row"], np.concatenate([sent[d]["row"] for d in range(3)]))
            same(arrived[rank]["row"], sum(split(outputs[d]["row"], [80 * 16] * 3)[rank] for d in range(3)))
            assert sent[rank]["data_parallel"].size == 2_000 * 64
            same(received[rank]["data_parallel"], sum(one["data_parallel"] for one in sent))
    assert all(map(any, columns.values()))
    assert all(set(one) == {*runs, *(("row", "data_parallel") if which == "mixed" else ())} for one in sent)


# --- sequences ----------------------------------------------------------------------------------------------


def _counted(rank, init_method, send, workloads):
    """Replay as a rank of replay_all's gang, and send the bytes of outputs and gradients that it sent by all-to-all."""
    inner, sent = dist.all_to_all_single, []

    def counted(into, source, *arguments, **named):
        if source.dtype == torch.float32:
            sent.append(4 * source.numel())
        return inner(into, source, *arguments, **named)

    dist.all_to_all_single = counted
    send((module.replay_rank(rank, init_method, workloads, SETTING, CONFIG), sent))


def replayed_as_lower_says(plan, problem, collective):
    """Replay a plan on two ranks. All parts are timed, and as many bytes travel by all-to-all as lower
    says."""
    workload = lower(plan, problem)
    last = dict(local_ranks.run_ranks("replay", _counted, 2, ([workload],), 60.0))
    ranks = [last[rank] for rank in range(2)]
    [cost] = combine_workload_costs([rank for rank, _ in ranks], None, JOB)
    for part in PARTS[:4]:
        assert min(getattr(cost, part)) > 0
    assert min(cost.input_ms) > 0 and cost.step.repeats == CONFIG.repeats
    entering = [
        of
        for c, of in zip(workload.channels, workload.traffic, strict=True)
        if c.collective == "all_to_all" and of.any()
    ]
    assert len(entering) == collective
    for rank, (_, sent) in enumerate(ranks):
        steps = np.reshape(sent, (CONFIG.warmups + CONFIG.repeats, 2 * len(entering)))
        assert (steps == steps[0]).all()
        there_and_back = [*(of[rank] for of in entering), *(of.sum() / 2 for of in entering)]
        # Half of an element cannot travel.
        assert np.abs(np.sort(steps[0]) - np.sort(there_and_back)).max() <= 4 * 2


def test_lookups_of_sequences_travel_as_lower_says():
    """A whole one, one by columns of two widths, one by rows, and a replica, beside a pooled table."""
    cold, hot, wide, zipf, _ = TABLES
    drawn = (dataclasses.replace(t, name=f"{t.name} clicks", sequence=True) for t in (cold, hot, wide, zipf))
    problem = problem_of((hot, *drawn), 2)
    pooled, whole_, cut, divided, copied = problem.tables
    plan = Plan(
        (
            column(pooled, 0),
            column(whole_, 1),
            column(cut, 0, 0, 8),
            column(cut, 1, 8),
            row(divided, problem.topology),
            replica(copied, problem.topology),
        )
    )
    # Of the pooled table, of sequences by columns, and of those by rows.
    replayed_as_lower_says(plan, problem, 3)


def test_distinct_values_of_deduplicated_tables_travel_as_lower_says():
    """Deduplicated tables are cut by columns beside another table, cut by rows, replicated, and a sequence."""
    session = [
        dataclasses.replace(t, name=f"{t.name} session", dedup=4.0, features=1 + i)
        for i, t in enumerate(TABLES[:4])
    ]
    session[3] = dataclasses.replace(session[3], sequence=True)
    problem = problem_of((TABLES[1], *session), 2)
    pooled, cut, divided, copied, clicks = problem.tables
    plan = Plan(
        (
            column(pooled, 0),
            column(cut, 0, 0, 8),
            column(cut, 1, 8),
            row(divided, problem.topology),
            replica(copied, problem.topology),
            column(clicks, 1),
        )
    )
    replayed_as_lower_says(plan, problem, 2)


# --- a gang of two hosts ------------------------------------------------------------------------------------


def _over_hosts(rank, init_method, send, workload):
    """Send what arrives of outputs that differ by rank and position, and what returns of such gradients."""
    torch.set_num_threads(1)

    def full(shape):
        return torch.zeros(tuple(shape))

    with local_ranks.report_lost_ranks():
        member = Rank(rank, 4, init_method, "cpu", CollectiveConfig(timeout_s=30.0))
        own = exchanges.make_process_groups(rank, workload.topology, exchanges.used_channels(workload))
        chain = exchanges.make_exchange_chains(workload, rank, full, own)[SHARDING_KINDS["host_row"]]
        (op,) = workload.ops[rank]
        outputs = torch.from_numpy(_marked(rank, (op.batch, sum(s.width for s in op.shards))))
        arrived = exchanges.send_outputs(chain, outputs).numpy().copy()
        chain[-1].gradients.copy_(torch.from_numpy(_marked(rank, chain[-1].gradients.shape)))
        back = torch.zeros_like(outputs)
        exchanges.send_gradients_back(chain, back)
    member.close()
    send((arrived, back.numpy()))


def _marked(rank, shape):
    return ((rank + 1) * 1000 + np.arange(np.prod(shape)).reshape(shape)).astype(np.float32)


def test_rows_over_a_host_are_summed_there_and_cross_hosts():
    """Two hosts of two ranks, 8 and 4 columns, 16 samples: rank i of host h ends with samples 8 i + 4 h and
    on."""
    wide, slim = Table("wide", 10, 8, 1.0), Table("slim", 10, 4, 1.0)
    problem = Problem("hosts", (wide, slim), on_hosts("aabb"), 16)
    workload = lower(Plan((host_row(wide, (0, 1)), host_row(slim, (2, 3)))), problem)
    last = dict(local_ranks.run_ranks("replay", _over_hosts, 4, (workload,), 60.0))
    of_host = [sum(_marked(r, (16, width)) for r in ranks) for ranks, width in (((0, 1), 8), ((2, 3), 4))]
    sent = [
        [[part.reshape(4, -1) for part in np.split(_marked(2 * h + i, (48,)), [4 * 8])] for h in range(2)]
        for i in range(2)
    ]
    for h in range(2):
        for i in range(2):
            arrived, back = last[2 * h + i]
            first = 8 * i + 4 * h
            same(arrived.ravel(), np.concatenate([x[first : first + 4].ravel() for x in of_host]))
            same(back, np.concatenate([sent[k][g][h] for k in range(2) for g in range(2)]))


def _gradients(rank, init_method, send, workload, in_a_box):
    """Send the order of the runs, the sum of a replica's gradients, and gradients that came back."""
    torch.set_num_threads(1)
    if in_a_box:
        os.environ[HOST_VARIABLE] = "0"

    def full(shape):
        return torch.zeros(tuple(shape))

    with local_ranks.report_lost_ranks():
        member = Rank(rank, 2, init_method, "cpu", CollectiveConfig(timeout_s=30.0))
        chains = exchanges.make_exchange_chains(
            workload, rank, full, exchanges.make_process_groups(rank, workload.topology, [])
        )
        for (exchange,) in chains.values():
            exchange.gradients.fill_(rank + 1.0)
        order = exchanges.backward_order(chains)
        for kind in order:
            exchanges.send_gradients_back(chains[kind], None)
    member.close()
    columns, copied = (chains[SHARDING_KINDS[name]][0] for name in ("column", "data_parallel"))
    send(([kind.name for kind in order], set(copied.gradients.tolist()), set(columns.outputs.tolist())))


@pytest.mark.parametrize("in_a_box", [True, False])
def test_over_hosts_gradients_of_replicas_are_launched_first_and_waited_for_last(in_a_box):
    copied, whole = Table("copied", 10, 8, 1.0), Table("whole", 10, 4, 1.0)
    problem = Problem("replicas", (copied, whole), on_hosts("ab"), 16)
    workload = lower(Plan((replica(copied, problem.topology), column(whole, 0))), problem)
    last = dict(local_ranks.run_ranks("replay", _gradients, 2, (workload, in_a_box), 60.0))
    # Each rank has the sum. The owner of `whole` has gradients of both ranks' samples, the other none.
    assert [x[1:] for _, x in sorted(last.items())] == [({3.0}, {1.0, 2.0}), ({3.0}, set())]
    assert not in_a_box or last[0][0] == ["column", "data_parallel"]


# --- one rank -----------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """replay_rank as the only rank, in this process."""
    cores = os.sched_getaffinity(0)
    yield lambda *arguments, **named: module.replay_rank(0, f"file://{tmp_path}/ranks", *arguments, **named)
    own_core.restore_cores(cores)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_each_step_meets_caches_that_were_overwritten_and_another_batch(tables, alone, monkeypatch):
    events, steps = [], []

    def noted(owner, name, event):
        inner = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda self, *a: (
                events.append((event, *a[:1]) if event == "step" else event),
                steps.append(self),
                inner(self, *a),
            )[-1],
        )

    noted(HardwareCaches, "evict_caches", "evict")
    noted(module._Step, "run_once", "step")
    noted(KernelBench, "run_once_ms", "reference")
    workload, progress = whole(problem_of(tables[3:4], 1)), []
    # ten times as large as the plan's
    reference = (ComputeRequest((Shard.whole(tables[0]),), SETTING.batch), 1.0)
    marks, reference_ms = alone(
        [workload] * 2,
        SETTING,
        dataclasses.replace(CONFIG, arena_bytes=MIB),
        progress=lambda: progress.append(1),
        reference=reference,
    )
    assert events == [x for i in range(6) for x in ["evict", ("step", i % 2)] * 2 + ["evict", "reference"]]
    assert [m.shape for m in marks] == [(CONFIG.repeats, 6)] * 2 and reference_ms.shape == (CONFIG.repeats,)
    assert all((np.diff(m) >= 0).all() for m in marks) and len(progress) == 2 + 6
    of_batch = [
        tuple(next(iter(batch.values()))[0].indices.tolist())
        for batch in next(s for s in steps if isinstance(s, module._Step))._compute._batches
    ]
    assert len(set(of_batch)) == CONFIG.batches


def test_one_device_computes_and_exchanges_nothing(tables, alone):
    cost = combine_marks(
        alone(
            [whole(problem_of(tables, 1))], dataclasses.replace(SETTING, optimizer="rowwise_adagrad"), CONFIG
        )[0],
        JOB,
    )
    assert cost.forward_compute_ms[0] > 0 and cost.backward_compute_ms[0] > 0 and cost.waiting_ms == (0.0,)
    assert cost.input_ms == (0.0,)


def test_a_reference_op_tells_the_slowdown(three):
    """The median over rounds, the mean over ranks: 3 ms where 2 are usual."""
    _, _, output = three
    marks = [m for (m, _), _ in output]
    ranks = list(zip(marks, ([1.0, 2.0, 9.0], [4.0, 4.0, 4.0], [3.0, 3.0, 3.0]), strict=True))
    slow, alone = (combine_workload_costs(ranks, reference, JOB)[0] for reference in ((None, 2.0), None))
    assert slow.slowdown == pytest.approx(1.5) and alone.slowdown == 1.0
    usual = slow.at_usual_speed()
    assert usual.total_ms == pytest.approx(slow.total_ms / 1.5) and usual.slowdown == 1.0
    assert usual.step.median_ms == pytest.approx(slow.step.median_ms / 1.5)


def test_waiting_and_transfer_are_told_apart_by_the_last_start():
    # begin, ids received, gradients received, updated, pooled, outputs received
    ms = np.array([[[-4.0, 0.0, 3.0, 5.0, 6.0, 12.0]] * 3, [[-3.5, 1.0, 3.5, 6.0, 8.0, 11.0]] * 3])
    expected = StepCost(
        forward_compute_ms=(1.0, 2.0),
        backward_compute_ms=(2.0, 2.5),
        forward_comm_ms=(4.0, 3.0),
        backward_comm_ms=(2.0, 2.5),
        waiting_ms=(2.0, 0.0),
        input_ms=(4.5, 4.5),
    )
    dense = {"dense_forward_ms": 1.0, "dense_backward_ms": 2.0}
    for job, ids_ms in ((JOB, 4.5), (Job("none", **dense), 4.5), (Job(**dense), 1.5)):
        cost = combine_marks(ms / 1e3, job)
        for part in PARTS[:-1]:
            assert getattr(cost, part) == pytest.approx(getattr(expected, part))
        assert cost.input_ms == pytest.approx((ids_ms, ids_ms))
        total_ms = 11.0 + ids_ms + job.dense_ms
        assert cost.total_ms == pytest.approx(total_ms) and cost.step.median_ms == pytest.approx(total_ms)


def test_a_workload_of_another_setting_is_refused_before_anything_starts(tables):
    problem = problem_of(tables, 2)
    with pytest.raises(SettingMismatch, match="another setting than the replay: batch: 240 against 512;"):
        replay(whole(problem), dataclasses.replace(SETTING, batch=512), CONFIG)
    h200 = dataclasses.replace(
        problem, topology=dataclasses.replace(problem.topology, hardware="nvidia-h200")
    )
    with pytest.raises(SettingMismatch, match="nvidia-h200"):
        replay(whole(h200), SETTING, CONFIG)
    with pytest.raises(ShardCoreError, match="3 and 2 devices"):
        replay_all([whole(problem), whole(problem_of(tables, 3))], SETTING, CONFIG)
    fast = dataclasses.replace(problem, topology=Topology((Device(64 * MIB), Device(64 * MIB, speed=2.0))))
    with pytest.raises(ShardCoreError, match="speed"):
        replay(whole(fast), SETTING, CONFIG)
    with pytest.raises(ShardCoreError, match="repeats"):
        ReplayConfig(repeats=0)
    hosts = dataclasses.replace(problem.topology, memory=(Memory("host", 64 * MIB, 10.0),))
    large = dataclasses.replace(tables[0], name="large", load_factor=0.5)
    cached = dataclasses.replace(problem, tables=(large,), topology=hosts)
    with pytest.raises(ShardCoreError, match="table 'large' has rows below device memory"):
        replay(whole(cached), SETTING, CONFIG)


def test_a_plan_with_a_shard_larger_than_the_arena_starts_no_process(tables):
    """A rank's own error would begin with its number."""
    with pytest.raises(
        ShardCoreError,
        match=r"^shard cold\[0:50000, 0:16\] is 3.1 MiB; the arena holds "
        r"1.0 MiB: give more \(--arena-gib",
    ):
        replay(whole(problem_of(tables, 1)), SETTING, dataclasses.replace(CONFIG, arena_bytes=MIB))


def processes():
    return [p for p in multiprocessing.active_children() if p.name.startswith("replay-rank")]


def test_a_rank_that_dies_in_a_step_ends_the_gang_and_is_named(tables):
    forever = dataclasses.replace(CONFIG, repeats=10**6)
    rounds = 0
    with pytest.raises(ShardCoreError, match="rank 1 of 2 failed: it was killed by SIGKILL"):
        for rank, _ in local_ranks.run_ranks(
            "replay",
            module._run_rank,
            2,
            ([whole(problem_of(tables, 2))], SETTING, forever, "cpu", None, None),
            60.0,
        ):
            rounds += rank == 1
            if rounds == 4:  # its op is built, and steps are under way
                [victim] = [p for p in processes() if p.name == "replay-rank-1"]
                os.kill(victim.pid, signal.SIGKILL)
    assert not processes()


def test_the_command_replays_plans_of_one_problem(tables, tmp_path, capsys):
    problem, other = problem_of(tables, 2), dataclasses.replace(problem_of(tables, 2), name="other")
    files.write_problem(tmp_path / "problem.json", problem)
    files.write_plan(tmp_path / "plan.json", mixed_plan(problem), problem)
    files.write_plan(tmp_path / "other.json", mixed_plan(other), other)
    arguments = ["--problem", str(tmp_path / "problem.json"), "--device", "cpu", "--repeats", "2"]
    plan, out = str(tmp_path / "plan.json"), tmp_path / "replay.json"
    assert main(["replay", plan, plan, *arguments, "--append", str(tmp_path), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    # what it has is not run again
    assert main(["replay", plan, plan, *arguments, "--append", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    total_ms = written["replays"][0]["total_ms"]
    # Twice: once with the JSON in a file, once alone. A row for each plan, and each device of it.
    assert shown.count(f"{plan}  {total_ms:>11.3f}") == 4 and "{" not in shown
    assert shown.count("ms of each device") == 4 and "predicted" not in shown
    [kept] = (tmp_path / "replays").iterdir()
    assert (
        json.loads((kept / "replays.json").read_text())["replays"][0]["total_ms"]
        == written["replays"][0]["total_ms"]
    )
    assert written["setting"]["batch"] == problem.global_batch and written["setting"]["hardware"]
    for cost in written["replays"]:
        assert (
            cost["plan"] == plan
            and cost["total_ms"] > 0
            and cost["step"]["repeats"] == 2
            and set(PARTS) < set(cost)
        )
    assert main(["replay", plan, str(tmp_path / "other.json"), *arguments]) == 1
    assert "'other'" in capsys.readouterr().err


def _groups(rank, init_method, send):
    dist.init_process_group("gloo", init_method, rank=rank, world_size=4)
    ranks, group = exchanges.make_process_groups(rank, on_hosts("abba"), [ACROSS])[ACROSS.group]
    send((list(ranks), dist.get_process_group_ranks(group)))
    dist.destroy_process_group()


def test_ranks_of_a_group_are_in_torchs_order():
    """The second devices of hosts a and b are ranks 3 and 2."""
    last = dict(local_ranks.run_ranks("test", _groups, 4, (), 60.0))
    assert all(ours == torchs for ours, torchs in last.values()) and last[3][0] == [2, 3]
