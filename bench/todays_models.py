"""Models of today against TorchRec's own modules and processes: bytes, memory and collisions.

    python -m bench.todays_models payloads --models 60 --out payloads.jsonl

Each part takes drawn models, one a line of --out. Run again, it goes on from there. Exits 1 if a byte differs.

payloads: outputs and gradients with scales (INT8, MX4, of several blocks), as TorchRec's codecs make them.
    Every collective of a step of TorchRec's real gloo processes is counted, as in bench/traffic.py. Of plans
    that ShardCore refuses for a codec, a few are run, too: TorchRec has to fail on them.
batches: features with batches of their own (VBE), in steps of the same kind.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.common import say
from shardcore import report

sys.path.append(str(Path(__file__).parents[1] / "tests" / "torchrec"))

import counted_traffic
import drawn_collections
from drawn_collections import Drawn

Row = dict[str, Any]


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
    return {**_of(model), "differences": counted_traffic.differences(seed, model)}


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
    groups: dict[str, list[Row]] = {"any": run}
    for name in drawn_collections.CODECS:
        groups[f"{name} forward or backward"] = [r for r in run if name in r["payloads"]]
    for kind in sorted({kind for row in run for kind in row["kinds"]}):
        groups[kind] = [r for r in run if kind in r["kinds"]]
    groups["sequences"] = [r for r in run if r["sequences"]]
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


# --- all ----------------------------------------------------------------------------------------------------


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
    return {**_of(model), **more, "differences": counted_traffic.differences(seed, model)}


def _batch_report(rows: Sequence[Row]) -> None:
    groups: dict[str, Sequence[Row]] = {"any": rows}
    for kind in sorted({kind for row in rows for kind in row["kinds"]}):
        groups[kind] = [r for r in rows if kind in r["kinds"]]
    for what in ("sequences", "weighted"):
        groups[what] = [r for r in rows if r[what]]
    _to_the_byte(groups)


PARTS: Mapping[str, tuple[Callable[[int], Row], Callable[[Sequence[Row]], None]]] = {
    "payloads": (_payloads, _payload_report),
    "batches": (_batches, _batch_report),
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
    done = {row["seed"]: row for row in common.lines_of(args.out)}
    for seed in (seed for seed in range(args.models) if seed not in done):
        done[seed] = {"seed": seed, **take(seed)}
        common.write_lines(args.out, list(done.values()))
        say(f"{len(done)} of {args.models}")
    rows = [done[seed] for seed in range(args.models)]
    show(rows)
    sys.exit(bool(Counter(bool(row["differences"]) for row in rows)[True]))


if __name__ == "__main__":
    main()
