"""Acceptance test of measuring on a GPU: one command of some minutes, and a verdict on each question.

    python -m bench.gpu_acceptance --out DIR --minutes 8

It needs torch, FBGEMM, numpy and pyarrow only. DIR/data is the dataset, which grows as groups finish: a run
that is cut short loses nothing, and a rerun goes on (`--only QUESTION ...` for some of it). DIR/verdicts.json
has the figures of all runs. Exits 1 if a verdict is bad.

- card: what runs here, and its profile.
- events: times by CUDA events against the profiler's kernel times, on 50 groups. At most 5% apart (median).
- uvm: tables in host memory, with caches of 5, 10, 20 and 50% of their rows: ms and misses, beside the
  profile's ms.
- groups: at least 2,000 in the time given, under 1% failed, at least 80% of the time in kernels.
- adagrad: a quarter of that time under FP16 and row-wise Adagrad; a quarter of the groups, under 1% failed.
- repeats: 64 groups measured again. At most 2% apart (median).
- exchanges: collectives among the GPUs of this host, where it has several; under 1% failed.
- memory: at most 90% of the card at any time.
- widths: narrow groups, wide ones and mixed ones, at least 5% each.
- profile: each op and collective against the profile's prediction. Good if three quarters of its kinds are
  within 25%.
- step: a traced step of a TorchRec job on one GPU (bench/gpu_step.py), where TorchRec is installed. DIR/job
  has it.
- tests: those of the kernels, where pytest is installed.

Not exercised on a GPU. Two rehearsals prove its paths, not its figures: `SHARDCORE_REHEARSAL` runs it with a
stand-in (tests/measure/fake_cuda.py), bench/empty_cuda/run.sh under CUDA's own builds of torch and FBGEMM
(docs/measure.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import common
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting, Shard, Table
from shardcore.core.validation import require
from shardcore.cost.model import group_op_ms
from shardcore.cost.profile import Profile, profile_of_device
from shardcore.cost.profile_model import ProfileModel
from shardcore.cost.profile_samples import NARROW, check_profile, sample_timings
from shardcore.io import dataset, writing
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import hardware
from shardcore.measure.devices import device_by_name
from shardcore.measure.index_streams import IndexStreams
from shardcore.measure.kernels import KernelBench, KernelConfig
from shardcore.measure.sampling.groups import GroupConfig, draw_compute_request
from shardcore.tables.generate import PoolConfig, generate_pool

ROOT = Path(__file__).parents[1]
GROUPS, AGAIN, COMPARED = 2000, 64, 50
ADAGRAD = "rowwise_adagrad"
SHARES = (0.05, 0.1, 0.2, 0.5)
"""Shares of a table's rows that its cache holds."""
Verdict = tuple[bool, dict[str, Any]]


def profile_of_card() -> Profile | None:
    """Published hardware profile of this machine's GPU. None if unpublished."""
    with suppress(ShardCoreError):
        return profile_of_device(device_by_name("cuda").product_name())


def card(_: argparse.Namespace) -> Verdict:
    device, profile = device_by_name("cuda"), profile_of_card()
    return True, {
        "name": hardware.hardware_name("cuda"),
        "profile": profile.name if profile else "none",
        **device.software_versions(),
    }


def events(args: argparse.Namespace) -> Verdict:
    """Compare times by CUDA events with times by the profiler, on the same groups of shards."""
    from torch.profiler import ProfilerActivity, profile

    place, live = device_by_name("cuda").place, [t for t in generate_pool(PoolConfig()) if t.pooling > 0]
    config = GroupConfig(max_shard_bytes=args.arena_bytes)
    setting = Setting(hardware.hardware_name("cuda"), args.batch)
    bench = KernelBench(setting, "cuda", KernelConfig(arena_bytes=args.arena_bytes))
    ratios = []
    for i in range(COMPARED):
        try:
            run = bench.prepare(draw_compute_request(live, i, setting, config=config))
        except (ShardCoreError, torch.OutOfMemoryError):
            continue
        by_events = np.median([bench.run_once_ms(run) for _ in range(8)][3:])
        activity = ProfilerActivity.CUDA if place == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as found:
            for _ in range(5):
                run.forward().backward(run.gradient)
            device_by_name("cuda").synchronize()
        us = sum(
            event.self_device_time_total if place == "cuda" else event.self_cpu_time_total
            for event in found.key_averages()
        )
        # Without rights to CUPTI the profiler sees no kernel.
        require(us > 0, "the profiler sees no kernels: events cannot be checked against it")
        ratios.append(float(by_events / (us / 5e3)))
    require(bool(ratios), "no group could be run")
    apart = float(np.median(np.abs(np.array(ratios) - 1)))
    return apart <= 0.05, {
        "groups": len(ratios),
        "median_apart": apart,
        "median_ratio": float(np.median(ratios)),
    }


def groups(args: argparse.Namespace) -> Verdict:
    began, used = time.monotonic(), _MemoryWatch()
    with used:
        output = _run_measure(args, "--minutes", f"{args.minutes:g}")
    found = _read_samples(args)
    failed = _failed_share(found)
    in_kernels = [int(share) for share in re.findall(r"(\d+)% of the time in kernels", output)][-1:]
    figures = {
        "groups": len(found),
        "failed": failed,
        "in_kernels": (in_kernels or [0])[0] / 100,
        "seconds": time.monotonic() - began,
        "peak_memory": used.peak,
    }
    return len(found) >= args.groups and failed < 0.01 and figures["in_kernels"] >= 0.8, figures


def adagrad(args: argparse.Namespace) -> Verdict:
    _run_measure(
        args, *f"--precision fp16 --optimizer {ADAGRAD} --minutes {max(0.5, args.minutes / 4):g}".split()
    )
    found = _read_samples(args, ADAGRAD)
    return len(found) >= args.groups / 4 and _failed_share(found) < 0.01, {
        "groups": len(found),
        "failed": _failed_share(found),
    }


def exchanges(args: argparse.Namespace) -> Verdict:
    ranks = device_by_name("cuda").device_count()
    if ranks < 2:
        return True, {"skipped": "one GPU exchanges nothing"}
    _run_measure(args, *f"--samples 0 --ranks {ranks} --exchanges {args.exchanges}".split())
    found = dataset.read_collective_samples(args.out / "data")
    return len(found) > 0 and _failed_share(found) < 0.01, {
        "exchanges": len(found),
        "failed": _failed_share(found),
    }


def memory(args: argparse.Namespace) -> Verdict:
    peak = json.loads((args.out / "verdicts.json").read_text()).get("groups", {}).get("peak_memory")
    return peak is not None and peak < 0.9, {"peak": peak}


def repeats(args: argparse.Namespace) -> Verdict:
    minutes = max(0.5, args.minutes / 4)
    _run_measure(args, *f"--samples {args.again} --again {args.again} --minutes {minutes:g}".split())
    apart = [
        abs(a.total_ms / b.total_ms - 1)
        for a, b, *_ in dataset.repeated_samples(dataset.read_compute_timings(args.out / "data"))
    ]
    require(bool(apart), "no group was measured again")
    return float(np.median(apart)) <= 0.02, {"groups": len(apart), "median_apart": float(np.median(apart))}


def widths(args: argparse.Namespace) -> Verdict:
    of = [[s.width for s in x.request.shards] for x in _read_samples(args) if len(x.request.shards) > 1]
    kinds = {"narrow": sum(max(w) <= NARROW for w in of), "wide": sum(min(w) > NARROW for w in of)}
    kinds["mixed"] = len(of) - sum(kinds.values())
    return min(kinds.values()) >= 0.05 * max(1, len(of)), kinds


def uvm(args: argparse.Namespace) -> Verdict:
    """Measure ms and miss ratio of a UVM-cached table, by share of rows in the cache."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    device = device_by_name("cuda")
    if device.place != "cuda":
        return True, {"skipped": "a stand-in has no host memory of its own"}
    found, profile, setting = {}, profile_of_card(), Setting(hardware.hardware_name("cuda"), args.batch)
    table = Table("cached", 2_000_000, 128, 10.0, Zipf(1.2))
    request = ComputeRequest((Shard.whole(table),), args.batch)
    ids, offsets = IndexStreams("cuda", device.max_stream_bytes(), 0).lookup_stream(request, 0)
    for share in SHARES:
        op = SplitTableBatchedEmbeddingBagsCodegen(
            [(table.rows, table.dim, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)],
            cache_load_factor=share,
            optimizer=EmbOptimType.EXACT_SGD,
            gather_uvm_cache_stats=True,
            device=torch.device("cuda"),
        )
        gradient, times = torch.ones(args.batch, table.dim, device="cuda"), []
        for _ in range(10):
            device.keep_busy(10.0)
            marks = [device.record_mark()]
            op(ids, offsets).backward(gradient)
            times.append(sum(device.elapsed_ms([*marks, device.record_mark()])))
        counts = op.get_uvm_cache_stats(use_local_cache=False).tolist()
        # FBGEMM counts calls, requested ids, distinct ids, and distinct ids missed.
        found[f"{share:.0%}"] = {"ms": float(np.median(times[3:])), "missed": counts[3] / max(1, counts[2])}
        if profile:
            cached = Shard.whole(dataclasses.replace(table, load_factor=share))
            model = ProfileModel(profile, dataclasses.replace(setting, hardware=profile.name))
            found[f"{share:.0%}"]["profile_ms"] = float(group_op_ms([[cached]], model, args.batch)[0])
    of_all = [x["ms"] for x in found.values()]
    return of_all == sorted(of_all, reverse=True), found


def profile(args: argparse.Namespace) -> Verdict:
    """Compare the GPU's published profile with measurements, by kind of op."""
    if not (card_profile := profile_of_card()):
        return True, {"skipped": "the card has no profile"}
    found = check_profile(
        card_profile,
        sample_timings(_read_samples(args, None), dataset.read_collective_samples(args.out / "data")),
    )
    print(*(f"  {check}" for check in found), sep="\n", flush=True)
    near = sum(abs(check.ratio - 1) <= 0.25 for check in found)
    return near >= 0.75 * len(found) > 0, {"profile": card_profile.name} | {
        check.kind: {"n": check.n, "ratio": check.ratio, "error": check.error} for check in found
    }


def step(args: argparse.Namespace) -> Verdict:
    if importlib.util.find_spec("torchrec") is None:
        return True, {"skipped": "TorchRec is not installed"}
    folder, card_profile = str(args.out / "job"), profile_of_card()
    _run_module("bench.gpu_step", folder, "--batch", str(args.batch))
    output = _run_module(
        "shardcore", "job", "read", folder, *(["--hardware", card_profile.name] if card_profile else [])
    )
    named = [float(share) for share in re.findall(r"^named +([\d.]+)%", output, re.M)]
    return bool(named) and named[0] >= 95, {"named_percent": named[:1]}


def tests(_: argparse.Namespace) -> Verdict:
    if importlib.util.find_spec("pytest") is None:
        return True, {"skipped": "pytest is not installed"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/measure/test_kernels.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode == 0, {"output": done.stdout.strip().splitlines()[-1:]}


QUESTIONS: tuple[Callable[[argparse.Namespace], Verdict], ...] = (
    card,
    events,
    uvm,  # short ones first: the machine may be taken away
    groups,
    adagrad,
    repeats,
    exchanges,
    memory,
    widths,
    profile,
    step,
    tests,
)


class _MemoryWatch:
    """Peak share of GPU memory in use, sampled twice a second. None if unknown."""

    peak: float | None = None

    def __enter__(self) -> None:
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            try:
                now = device_by_name("cuda").used_memory_share()
            except ShardCoreError:
                return
            self.peak = max(self.peak or 0.0, now)


def _run_measure(args: argparse.Namespace, *more: str) -> str:
    """Run `python -m shardcore measure` and return its output. Raises ShardCoreError if the command fails."""
    options = f"--device cuda --batch {args.batch} --out".split()
    return _run_module("shardcore", "measure", *options, str(args.out / "data"), *more, *args.options)


def _run_module(*module: str) -> str:
    """Run a Python module, show its output and return it. Raises ShardCoreError if the module fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", *module], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout or ():
        print(f"  {line}", end="", flush=True)
        lines.append(line)
    if process.wait():
        raise ShardCoreError(f"{module[0]} ended with {process.returncode}: {''.join(lines[-1:]).strip()}")
    return "".join(lines)


def _read_samples(args: argparse.Namespace, optimizer: str | None = "exact_sgd") -> list[Any]:
    """Read the measured groups of an optimizer. None: of all optimizers."""
    found = dataset.read_compute_samples(args.out / "data")
    return [s for s in found if optimizer in (None, s.setting.optimizer)]


def _failed_share(samples: Sequence[Any]) -> float:
    return sum(s.error is not None for s in samples) / max(1, len(samples))


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        out=...,
        minutes=(8.0, "for groups"),
        batch=(device_by_name("cuda").batch, "global batch"),
        groups=(GROUPS, "that there have to be"),
        again=(AGAIN, "groups to measure again"),
        exchanges=(200, "collectives among several GPUs"),
        arena_gib=(8.0, "where events are compared"),
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[q.__name__ for q in QUESTIONS],
        metavar="QUESTION",
        default=[q.__name__ for q in QUESTIONS],
        help="default: all",
    )
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="more for `shardcore measure`")
    args = parser.parse_args()
    args.out, args.arena_bytes = args.out.resolve(), int(args.arena_gib * 2**30)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "verdicts.json"
    verdicts = json.loads(path.read_text()) if path.exists() else {}
    for question in (q for q in QUESTIONS if q.__name__ in args.only):
        try:
            good, figures = question(args)
        # Whatever it is: time on a GPU is short, and the other questions can be answered.
        except Exception as error:
            good, figures = False, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        verdicts[question.__name__] = {"good": good, **figures}
        writing.write_json(path, verdicts)  # after each: the machine may be taken away
        print(f"{'good' if good else 'BAD '}  {question.__name__}: {figures}", flush=True)
    sys.exit(not all(verdicts[name]["good"] for name in args.only))


if __name__ == "__main__":
    main()
