"""How much longer does an exchange take after work? The same exchanges between idle ranks, and between ranks
kept busy before.

    python -m bench.exchanges

Each is measured at every one of --busy-ms, all in turn, --rounds times over, between processes of this
machine (collectives.measure_all; CollectiveRequest.busy_ms). A figure is one way's transfer of the slowest
rank, the mean of forward and backward, the median of the rounds; a ratio is to the first of --busy-ms. Ranks
start together, so none waits for another. Other work on the machine ruins the ratios (at a load of 6 on 2
cores they were 0.7 to 22).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence

from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OUTPUT_BYTES, Setting
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure import collectives, hardware

COLUMNS = (8, 32, 150, 300)
"""Of a rank's pooled outputs, in an all-to-all or a reduce-scatter."""
DENSE = (1 << 12, 1 << 16, 1 << 19)
"""Elements of an all-reduce's gradient."""


def requests(ranks: int, batch: int) -> list[CollectiveRequest]:
    start = (0.0,) * ranks
    pooled = [(kind, columns, batch) for kind in ("all_to_all", "reduce_scatter") for columns in COLUMNS]
    dense = [("all_reduce", elements // 64, 64) for elements in DENSE]
    return [CollectiveRequest((width,) * ranks, rows, start, kind) for kind, width, rows in pooled + dense]


def measured(
    asked: Sequence[CollectiveRequest],
    busy_ms: Sequence[float],
    ranks: int,
    setting: Setting,
    rounds: int,
    repeats: int,
) -> dict[CollectiveRequest, list[float]]:
    """ms one way of each request at each busy_ms, of each round."""
    found: dict[CollectiveRequest, list[float]] = {
        dataclasses.replace(r, busy_ms=ms): [] for r in asked for ms in busy_ms
    }
    config = collectives.CollectiveConfig(repeats=repeats)
    for sample in collectives.measure_all(list(found) * rounds, ranks, setting, config):
        ways = [way for way in (sample.forward, sample.backward) if way]
        found[sample.request].append(statistics.mean(max(spread.median_ms for spread in way) for way in ways))
    return found


def text(
    asked: Sequence[CollectiveRequest], busy_ms: Sequence[float], found: dict[CollectiveRequest, list[float]]
) -> str:
    rows, ratios = [], []
    for request in asked:
        ms = [statistics.median(found[dataclasses.replace(request, busy_ms=busy)]) for busy in busy_ms]
        ratios.append([x / ms[0] for x in ms[1:]])
        sent_kib = request.widths[0] * request.batch * OUTPUT_BYTES / 1024
        rows.append(
            (request.collective, f"{sent_kib:,.0f}", f"{ms[0]:.2f}", *(f"{x:.2f}" for x in ratios[-1]))
        )
    rows.append(
        ("median", "", "", *(f"{statistics.median(column):.2f}" for column in zip(*ratios, strict=True)))
    )
    head = (
        "collective",
        "KiB of a rank",
        f"ms after {busy_ms[0]:g} ms of work",
        *(f"after {busy:g} ms" for busy in busy_ms[1:]),
    )
    return report.text_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2048, help="global (2048)")
    parser.add_argument("--busy-ms", type=float, nargs="+", default=[0.0, 5.0, 20.0, 30.0])
    parser.add_argument("--rounds", type=int, default=3, help="times that all are measured (3)")
    parser.add_argument("--repeats", type=int, default=7, help="of each exchange each time (7)")
    args = parser.parse_args()
    asked = requests(args.ranks, args.batch)
    setting = Setting(hardware.hardware_name("cpu"), args.batch)
    found = measured(asked, args.busy_ms, args.ranks, setting, args.rounds, args.repeats)
    print(text(asked, args.busy_ms, found))


if __name__ == "__main__":
    try:
        main()
    except ShardCoreError as error:
        sys.exit(str(error))
