"""Models of today against TorchRec's own modules and processes: bytes, memory and collisions.

    python -m bench.todays_models payloads --models 60 --out payloads.jsonl

Each part takes drawn models, one a line of --out. Run again, it goes on from there. Exits 1 if a byte differs.

payloads: outputs and gradients with scales (INT8, MX4, of several blocks), as TorchRec's codecs make them.
    Every collective of a step of TorchRec's real gloo processes is counted, as in bench/traffic.py. Of plans
    that ShardCore refuses for a codec, a few are run, too: TorchRec has to fail on them.
batches: features with batches of their own (VBE), in steps of the same kind.
collisions: share of a stream's lookups that collide in a hash table, predicted and counted: in a simulation of
    MPZCH's probing (FBGEMM inserts on CUDA only), and in TorchRec's own module of the exact map.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.common import say
from shardcore import report
from shardcore.core.access_statistics import ManagedCollision, Zipf
from shardcore.core.types import Table
from shardcore.tables.hash_tables import collided_share

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("torchrec", "tables")]

import counted_traffic
import drawn_collections
import probing
from drawn_collections import Drawn

Row = dict[str, Any]
_LIMIT_S = 900
"""s for a model, on a machine that does other work too."""


# --- payloads -----------------------------------------------------------------------------------------------


def _payloads(seed: int) -> Row:
    # Each tenth is a plan that is refused.
    if seed % 10 == 9:
        model, refusal = drawn_collections.refused(seed)
        try:
            counted_traffic.counted(model, seed, limit_s=40)
        except SystemExit as error:
            return {**_of(model), "refused": refusal, "ended": str(error), "differences": []}
        return {**_of(model), "refused": refusal, "differences": ["TorchRec ran a plan that is refused"]}
    model = drawn_collections.coded(seed)
    return {**_of(model), "differences": counted_traffic.differences(seed, model, _LIMIT_S)}


def _of(model: Drawn) -> Row:
    job = model.problem.job
    return {
        "devices": len(model.problem.topology),
        "kinds": sorted({p.kind for p in model.plan.placements}),
        "sequences": any(t.sequence for t in model.problem.tables),
        "payloads": [job.forward_payload, job.backward_payload],
    }


def _payload_report(rows: Sequence[Row]) -> None:
    run = [row for row in rows if "refused" not in row]
    groups: dict[str, Sequence[Row]] = {"any": run}
    for name in drawn_collections.CODECS:
        groups[f"{name} forward or backward"] = [r for r in run if name in r["payloads"]]
    groups |= _by_kind(run) | {"sequences": [r for r in run if r["sequences"]]}
    _to_the_byte(groups)
    refused = [row for row in rows if "refused" in row]
    failed = sum("ended" in row for row in refused)
    print(f"\nPlans refused for a codec: {len(refused)}; TorchRec fails on {failed} of them.\n")
    shown = [(name, *(f"{ms:.2f}" for ms in _codec_ms(name))) for name in ("fp16", "int8", "mx4")]
    print(report.text_table(("codec on this CPU, 1 Mi elements", "encode, ms", "decode, ms"), shown))


def _codec_ms(name: str, repeats: int = 20) -> tuple[float, float]:
    """Median ms to encode and decode 2^20 FP32 elements."""
    import torch

    from shardcore.measure.exchanges import codec_of

    codec, source = codec_of(name), torch.randn(1 << 20)
    context, times = codec.create_context(), []
    for _ in range(repeats):
        began = time.perf_counter()
        sent = codec.encode(source, context)
        between = time.perf_counter()
        codec.decode(sent, context)
        times.append((between - began, time.perf_counter() - between))
    encode, decode = 1e3 * np.median(times, 0)
    return float(encode), float(decode)


# --- payloads and batches -----------------------------------------------------------------------------------


def _by_kind(rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    kinds = sorted({kind for row in rows for kind in row["kinds"]})
    return {kind: [row for row in rows if kind in row["kinds"]] for kind in kinds}


def _to_the_byte(groups: Mapping[str, Sequence[Row]]) -> None:
    shown = [(name, len(some), sum(not r["differences"] for r in some)) for name, some in groups.items()]
    print(report.text_table(("models with", "models", "to the byte"), shown))
    for row in groups["any"]:
        for words in row["differences"]:
            print(f"model {row['seed']}: {words}")


# --- batches ------------------------------------------------------------------------------------------------


def _batches(seed: int) -> Row:
    model = drawn_collections.variable(seed)
    more = {"weighted": any(t.weighted for t in model.problem.tables)}
    return {**_of(model), **more, "differences": counted_traffic.differences(seed, model, _LIMIT_S)}


def _batch_report(rows: Sequence[Row]) -> None:
    features = {what: [r for r in rows if r[what]] for what in ("sequences", "weighted")}
    _to_the_byte({"any": rows} | _by_kind(rows) | features)


# --- collisions ---------------------------------------------------------------------------------------------


def _collisions(seed: int) -> Row:
    """A drawn table by a power law: collisions predicted, and counted. Each fourth is TorchRec's exact map."""
    rng = np.random.default_rng([seed, 7])
    alpha, lookups = float(rng.uniform(0, 1.4)), int(rng.integers(50_000, 200_000))
    exact = seed % 4 == 3
    collision = ManagedCollision(
        8, buckets=int(rng.choice([1, 2, 8])), probes=0 if exact else int(rng.choice([16, 64, 128]))
    )
    # Rows in multiples of all buckets: those of the universe of ids.
    ids = 8 * int(rng.integers(2_500, 5_000))
    table = Table("t", ids, 8, 1.0, Zipf(alpha), managed_collision=collision)
    stream, load = probing.stream(table, lookups, seed), float(rng.uniform(0.5, 2.0))
    rows = max(8, int(len(np.unique(stream)) / load) // 8 * 8)
    if exact:
        found = _of_module(stream, rows)
    else:
        found = probing.counted(stream, rows, collision.buckets, collision.probes, seed)
    return {
        "alpha": alpha,
        "probes": collision.probes,
        "load": load,
        "predicted": collided_share(table, rows, lookups),
        "counted": found,
        "differences": [],
    }


def _of_module(stream: np.ndarray, rows: int, batches: int = 100) -> float:
    """Share of lookups that TorchRec's MCHManagedCollisionModule (LFU) maps to its shared row, in the later half."""
    import torch
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    module = MCHManagedCollisionModule(rows, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
    module.train()
    shared = []
    for ids in np.array_split(stream, batches):
        values = torch.from_numpy(ids)
        features = {"f": JaggedTensor(values, lengths=torch.ones(len(ids), dtype=torch.int64))}
        module.profile(features)
        mapped = module.remap(features)["f"].values()
        shared.append(float((mapped == rows - 1).double().mean()))
    return float(np.mean(shared[batches // 2 :]))


def _collision_report(rows: Sequence[Row]) -> None:
    shown = []
    for name, of in (
        ("16 probes", [r for r in rows if r["probes"] == 16]),
        ("64 probes", [r for r in rows if r["probes"] == 64]),
        ("128 probes", [r for r in rows if r["probes"] == 128]),
        ("exact map, TorchRec's module with LFU", [r for r in rows if not r["probes"]]),
    ):
        off = [abs(r["predicted"] - r["counted"]) for r in of]
        if off:
            within = sum(x <= 0.01 for x in off)
            shown.append((name, len(of), f"{100 * np.median(off):.2f}", f"{100 * max(off):.2f}", within))
    print(report.text_table(("tables", "number", "median off, points", "most", "within 1 point"), shown))


PARTS: Mapping[str, tuple[Callable[[int], Row], Callable[[Sequence[Row]], None]]] = {
    "payloads": (_payloads, _payload_report),
    "batches": (_batches, _batch_report),
    "collisions": (_collisions, _collision_report),
}
"""By name: what one drawn model gives, and the report of all."""


def main() -> None:
    parser = common.parser(
        __doc__,
        {"part": f"one of {', '.join(PARTS)}"},
        models=(60, "to draw"),
        out=(..., "a line of JSON for each model"),
    )
    args = parser.parse_args()
    if args.part not in PARTS:
        parser.error(f"part is {args.part!r}; known are {', '.join(PARTS)}")
    take, show = PARTS[args.part]
    done = {row["seed"]: row for row in common.rows_with(args.out, {"part": args.part})}
    for seed in (seed for seed in range(args.models) if seed not in done):
        done[seed] = {"part": args.part, "seed": seed, **take(seed)}
        common.write_lines(args.out, list(done.values()))
        say(f"{len(done)} of {args.models}")
    rows = [done[seed] for seed in range(args.models)]
    show(rows)
    sys.exit(any(row["differences"] for row in rows))


if __name__ == "__main__":
    main()
