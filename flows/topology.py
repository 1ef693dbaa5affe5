"""topology: find which devices of the Ray cluster are near each other, and the bandwidths of their links."""

import argparse
from pathlib import Path

from prefect import flow

from shardcore.measure.pairs import PairConfig
from tasks import console, services
from tasks.topology import find_links


@flow(name="topology")
def topology(
    problem: str, out: str, ranks: str | None = None, message_kib: int = 1024, repeats: int = 3
) -> str:
    """Time messages between all pairs of ranks, one for each device of a problem, on the Ray cluster. Write
    the problem with the hosts and bandwidths that were found. Returns a report.

    Args:
        problem: Problem file. It needs as many devices as the job will have.
        out: File to write the problem with hosts and bandwidths to.
        ranks: File to write the order of ranks, their nodes, their groups and the times of pairs to.
        message_kib: KiB of the messages whose times show which ranks are near each other.
        repeats: Repeats of each message, in each of three sweeps. The fastest counts.
    """
    config = PairConfig(message_kib, repeats=repeats)
    return find_links(Path(problem), Path(out), Path(ranks) if ranks else None, config)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.topology",
        description="Find which devices of the Ray cluster at RAY_ADDRESS "
        "are near each other, and the bandwidths of their links. `python -m shardcore topology measure` does so "
        "without Ray, on this machine or under torchrun.",
    )
    parser.add_argument(
        "problem", metavar="PROBLEM.json", help="problem with as many devices as the job will have"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="PROBLEM.json",
        help="write the problem with hosts and bandwidths there",
    )
    parser.add_argument(
        "--ranks",
        metavar="RANKS.json",
        help="write the order of ranks, their nodes, their groups and the times of pairs there",
    )
    args = parser.parse_args()
    services.run_flow(lambda: console.show("text", f"\n{topology(args.problem, args.out, args.ranks)}"))


if __name__ == "__main__":
    main()
