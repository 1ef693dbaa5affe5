"""`python -m shardcore measure`: what a folder lacks, measured on this machine's device in a supervised
process."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardcore import files
from shardcore.draws import MOST_DRAWS, MOST_RANKS, different
from shardcore.draws.collectives import comm_request, emulated_request
from shardcore.draws.groups import GroupConfig, compute_request, reference_request
from shardcore.draws.steps import first_step_plans
from shardcore.errors import ShardCoreError
from shardcore.fused import OPTIMIZERS
from shardcore.limits import WAITS_S, require_within
from shardcore.measure import collectives, hardware, kernels
from shardcore.measure.device_bench import BenchSpec
from shardcore.measure.devices import device_of
from shardcore.measure.hosts import Box
from shardcore.measure.local_workers import LocalTransport
from shardcore.measure.replay import ReplayConfig, of_samples, replay_all
from shardcore.measure.supervise import Supervisor
from shardcore.measurements import CollectiveRequest, CollectiveSample, ComputeRequest, ComputeSample
from shardcore.samples import dataset, replays
from shardcore.tables.generate import PoolConfig, generate_pool
from shardcore.tables.held_out import kept_for_testing
from shardcore.types import PRECISION_BYTES, Problem, Setting, Table

_ESTIMATE_S = 5.0
"""Seconds of measuring from which a dry run estimates."""
_CALIBRATE_S = 5.0
"""Seconds in which the reference op's ms are found, where a folder has none."""
_PROGRESS_S = 5.0
_LONGEST_END = 0.25
"""The share of the time that may be kept for what still runs at the end."""
_LATE_S = 5.0
"""What is not there so long after the time is over is given up."""
_STATES = 4
"""Room for the optimizer's state of a row, in rows of the largest table. Tables beyond it share it."""
_KEEP_EVERY_S = 5.0
"""Between two writes, whatever the chunk: at most so much that has finished is lost at a kill."""


def measure(args: argparse.Namespace) -> None:
    """What `python -m shardcore measure` does, its arguments as parsed there."""
    began, counts, ranks = time.monotonic(), (0, MOST_DRAWS), (1, MOST_RANKS)
    require_within(args, "measure", exchanges=counts, steps=counts, ranks=ranks, hang_s=WAITS_S)
    device = hardware.detect_device() if args.device == hardware.AUTO else args.device
    hardware.require_device(device)
    setting = Setting(args.hardware or hardware.hardware_name(device),
                      args.batch or device_of(device).batch, args.precision, args.optimizer)
    arena_bytes = int(args.arena_gib * 2**30) if args.arena_gib else _arena_bytes(setting, device)
    pool = files.read_pool(args.pool) if args.pool else generate_pool(PoolConfig())
    live = [t for t in pool if t.pooling > 0]
    if not live:
        raise ShardCoreError(f"{args.pool} holds no table with lookups")
    config = kernels.KernelConfig(arena_bytes=arena_bytes, tolerance=args.tolerance,
                                  max_repeats=args.max_repeats, interleave=args.interleave,
                                  state_rows=_STATES * max(t.rows for t in live))
    groups = GroupConfig(max_shards=args.max_shards, max_width=args.max_width,
                         max_shard_bytes=config.arena_bytes, sequences=args.sequences)
    if args.exchanges or args.steps:
        _require_ranks(args, setting, device)
    if args.steps and device == "cpu" and args.ranks > (cores := len(os.sched_getaffinity(0))):
        raise ShardCoreError(f"--ranks is {args.ranks}; steps of so many need as many cores, "
                             f"here are {cores}")
    box = _box(args, device)
    exchanges = _missing_exchanges(args, setting, box) if args.exchanges else []
    of_steps = of_samples(arena_bytes, args.hang_s)
    steps = _missing_steps(args, live, setting, of_steps) if args.steps else []
    plans = sum(len(made) for _, made in steps)
    there = dataset.read_ids(args.out, "compute")
    disturbed = there & dataset.disturbed_ids(args.out, config.tolerance_on(device))
    known = there - disturbed
    drawn = [t for t in live if kept_for_testing(t)] if args.held_out else live
    draws = different(lambda i: compute_request(drawn, i, setting, args.seed, groups),
                       lambda r: dataset.compute_id(setting, r), args.samples)
    missing = (r for n, (key, r) in enumerate(draws) if n < args.again or key not in known)
    first = next(missing, None)
    if first:
        reference = reference_request(live, setting, groups)
        reference_ms = dataset.usual_ms(args.out, setting, reference)
        transport = LocalTransport(BenchSpec(setting, device, config, reference), args.hang_s)
        with Supervisor(transport, reference_ms=reference_ms, hang_s=args.hang_s) as bench:
            missing = itertools.chain([first], missing)
            if args.dry_run:
                _estimate(args, bench, missing)
            else:
                again = f", {len(disturbed)} of them disturbed and to be measured again" if disturbed else ""
                print(f"measuring for {setting} into {args.out}, {len(there)} samples there already{again}",
                      flush=True)
                beside = [compute_request(live, i, setting, args.seed, groups)
                          for i in range(config.interleave)]
                _measure_compute(args, bench, missing, beside, pool, began)
    elif args.samples:
        print(f"{args.out} holds the first {args.samples} samples already", flush=True)
    if exchanges and args.dry_run:
        print(f"{len(exchanges)} of the first {args.exchanges} exchanges are missing")
    elif exchanges:
        _measure_exchanges(args, exchanges, setting, device, box)
    if plans and args.dry_run:
        print(f"{plans} of the first {args.steps} steps are missing")
    elif plans:
        _measure_steps(args, steps, setting, device, of_steps)
    if not args.dry_run:
        dataset.merge_parts(args.out)


def _arena_bytes(setting: Setting, device: str) -> int:
    """The default arena: what its weights may take beside their state."""
    weights = PRECISION_BYTES[setting.precision]
    state = OPTIMIZERS[setting.optimizer].state_bytes("cell")
    return device_of(device).arena_bytes(weights / (weights + state))


def _measure_compute(args: argparse.Namespace, bench: Supervisor, missing: Iterable[ComputeRequest],
                     beside: Sequence[ComputeRequest], tables: Sequence[Table], started: float) -> None:
    """Measure until the minutes since `started` are over, what runs then included."""
    done, failed, began, said = 0, 0, time.monotonic(), time.monotonic()
    deadline = started + 60 * args.minutes
    if bench.reference_ms is None:
        print(f"the reference op takes {bench.calibrate(beside, _CALIBRATE_S):.3g} ms", flush=True)

    # Only now: what cannot be measured leaves no folder.
    pool = dataset.write_pool(args.out, tables)

    def tell(sample: ComputeSample | None = None) -> None:
        nonlocal done, failed, said
        now = time.monotonic()
        if sample and sample.request != bench.spec.reference:
            done, failed = done + 1, failed + (sample.error is not None)
            if sample.error:
                print(f"failed: {sample.error}", file=sys.stderr)
        if sample is None or now - said > _PROGRESS_S:
            said, elapsed = now, now - began
            print(f"{done} samples{f' ({failed} failed)' if failed else ''}, {done / elapsed:.1f} a second, "
                  f"{bench.kernel_s / elapsed:.0%} of the time in kernels, "
                  f"{bench.kept_s / elapsed:.0%} in runs that entered a "
                  f"median, {max(0.0, (deadline - now) / 60):.1f} min left at most", flush=True)

    def has_time(_: ComputeRequest) -> bool:
        """Whether a request can finish in time, by how long those so far took."""
        now = time.monotonic()
        each_s = (now - began) / done if done else 0.0
        return now + min(args.interleave * each_s, _LONGEST_END * 60 * args.minutes) < deadline

    samples = bench.samples(itertools.takewhile(has_time, missing))
    in_time = itertools.takewhile(lambda _: time.monotonic() < deadline + _LATE_S, samples)
    _keep(in_time, args.chunk, lambda some: dataset.write_compute(args.out, some, pool), tell)
    tell()


def _estimate(args: argparse.Namespace, bench: Supervisor, missing: Iterable[ComputeRequest]) -> None:
    """Say how long measuring will take, from some seconds of it."""
    missing = list(missing) if args.samples else missing
    began = time.monotonic()
    some = itertools.takewhile(lambda _: time.monotonic() - began < _ESTIMATE_S, missing)
    rate = sum(s.request != bench.spec.reference for s in bench.samples(some)) / (time.monotonic() - began)
    if args.samples:
        print(f"{len(missing)} of the first {args.samples} samples are missing in {args.out}: about "
              f"{len(missing) / rate / 60:.1f} min at {rate:.1f} a second")
    else:
        print(f"about {rate * args.minutes * 60:.0f} samples in {args.minutes:g} min, at {rate:.1f} a second")


def _require_ranks(args: argparse.Namespace, setting: Setting, device: str) -> None:
    if setting.batch % args.ranks or args.ranks < 2:
        raise ShardCoreError(f"--ranks is {args.ranks}; an exchange needs at least 2, "
                             f"and a number that divides the batch of {setting.batch}")
    if device == "cuda" and torch.cuda.device_count() < args.ranks:
        raise ShardCoreError(f"--ranks is {args.ranks}; here are {torch.cuda.device_count()} GPUs")


def _box(args: argparse.Namespace, device: str) -> Box | None:
    """The hosts to emulate. None: none are asked for."""
    if args.hosts is None:
        if args.between_gbit_s or args.within_gbit_s:
            raise ShardCoreError("--between-gbit-s and --within-gbit-s are of emulated hosts; they need "
                                 "--hosts")
        return None
    if args.between_gbit_s is None:
        raise ShardCoreError(f"--hosts is {args.hosts}; emulated hosts need --between-gbit-s, the rate of "
                             "their links")
    if not args.exchanges or args.steps or device != "cpu":
        raise ShardCoreError(f"--hosts is {args.hosts}; emulated hosts only have exchanges on cpu: it needs "
                             "--exchanges, no --steps, and --device cpu")
    if args.ranks % args.hosts:
        raise ShardCoreError(f"--ranks is {args.ranks}; each of {args.hosts} hosts needs as many")
    return Box(args.hosts, args.ranks // args.hosts, args.between_gbit_s, args.within_gbit_s)


def _missing_exchanges(args: argparse.Namespace, setting: Setting,
                       box: Box | None) -> list[CollectiveRequest]:
    known = dataset.read_ids(args.out, "comm")

    def draw(i: int) -> CollectiveRequest:
        if box is None:
            return comm_request(i, args.ranks, setting.batch, args.seed)
        return emulated_request(i, (box.hosts, box.ranks_per_host), setting.batch, box.links, args.seed)

    draws = different(draw, lambda r: dataset.comm_id(setting, r), args.exchanges)
    return [r for key, r in draws if key not in known]


def _measure_exchanges(args: argparse.Namespace, missing: Sequence[CollectiveRequest], setting: Setting,
                       device: str, box: Box | None) -> None:
    began, done = time.monotonic(), 0
    among = f" among {args.ranks} ranks of {box.hosts} {box.links.words}" if box else ""

    def tell(_: CollectiveSample) -> None:
        nonlocal done
        done += 1
        if done % args.chunk == 0 or done == len(missing):
            rate = done / (time.monotonic() - began)
            print(f"{done} of {len(missing)} exchanges{among}, {rate:.1f} a second", flush=True)

    config = collectives.CollectiveConfig()
    if box:  # its ranks share cores, while they start too
        config = replace(config, timeout_s=config.timeout_s * math.ceil(args.ranks / os.cpu_count()))
    samples = collectives.measure_all(missing, args.ranks, setting, config, device, box)
    _keep(samples, args.chunk, lambda some: dataset.write_comm(args.out, some), tell)


def _missing_steps(args: argparse.Namespace, live: Sequence[Table], setting: Setting,
                   config: ReplayConfig) -> list[tuple[Problem, list]]:
    """The plans to replay, by their problems."""
    drawn = first_step_plans(live, args.steps, setting, args.ranks, config.arena_bytes, args.seed)
    return replays.missing(args.out, drawn, setting)


def _measure_steps(args: argparse.Namespace, missing: Sequence[tuple[Problem, list]], setting: Setting,
                   device: str, config: ReplayConfig) -> None:
    reference = dataset.reference_op(args.out, setting)
    done, total, began = 0, sum(len(made) for _, made in missing), time.monotonic()
    for problem, made in missing:
        replays.append(args.out, problem, made, setting, config,
                       lambda w: replay_all(w, setting, config, device, reference))
        done += len(made)
        print(f"{done} of {total} steps, {(time.monotonic() - began) / done:.1f} s each", flush=True)


def _keep(samples: Iterable[Any], chunk: int, write: Callable[[list[Any]], Any],
          tell: Callable[[Any], None]) -> None:
    """Write samples in parts of `chunk` as they come, what has come every _KEEP_EVERY_S, and what is left
    also where an error or Ctrl-C ends them."""
    waiting: list[Any] = []
    failed: list[Exception] = []
    taking, ended = threading.Lock(), threading.Event()

    def put(at_least: int = 1) -> None:
        with taking:
            if len(waiting) >= at_least:
                write(waiting)
                waiting.clear()

    def put_now_and_then() -> None:
        try:
            while not ended.wait(_KEEP_EVERY_S):
                put()
        except Exception as error:
            failed.append(error)

    beside = threading.Thread(target=put_now_and_then, daemon=True)
    beside.start()
    try:
        for sample in samples:
            if failed:
                raise failed[0]
            with taking:
                waiting.append(sample)
            put(chunk)
            tell(sample)
    finally:
        ended.set()
        beside.join()
        put()
