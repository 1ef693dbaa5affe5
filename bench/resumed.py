"""A run of `python -m shardcore measure` killed with SIGKILL at random moments and resumed, against an
undisturbed one.

The undisturbed run measures the first N draws into OUT/undisturbed. Runs into OUT/killed are killed one after
the other, at moments drawn evenly from their start to somewhat after the first part was written; a last one
ends by itself. Both folders must then hold the same samples, each once (the reference op aside, which is
measured all the time), the killed one no unfinished file, and no process of a killed run may live on. What a
kill leaves half written is given the age of two hours before the last run, which removes only what no other
machine can still be writing. Exit code 1 where anything differs.

  python bench/resumed.py --out /tmp/kills
  python bench/resumed.py --out /tmp/kills --kills 2 --samples 24 -- --device cuda
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from shardcore import report

TOY = [
    "--batch",
    "64",
    "--max-shards",
    "6",
    "--arena-gib",
    "0.03125",
    "--chunk",
    "8",
    "--minutes",
    "60",
    "--tolerance",
    "0.9",
]
"""A tolerance so wide that no sample counts as disturbed, which a rerun would measure once more."""


def start(folder: Path, samples: int, options: list[str]) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "shardcore",
        "measure",
        "--samples",
        str(samples),
        "--out",
        str(folder),
        *TOY,
        *options,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def run(folder: Path, samples: int, options: list[str]) -> tuple[float, float]:
    """Measure to the end; the seconds until the first part was written, and in all. Ends this program where
    it fails."""
    began, process, first_s = time.monotonic(), start(folder, samples, options), None
    while process.poll() is None:
        if first_s is None and ids(folder):
            first_s = time.monotonic() - began
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"measuring into {folder} ended with exit code {process.returncode}")
    return first_s or 0.0, time.monotonic() - began


def kill(process: subprocess.Popen, after_s: float) -> tuple[bool, float]:
    """SIGKILL it after a while. Whether it still ran, and the seconds after which the last process it had
    started was gone (infinite: 10 s later it still was there)."""
    time.sleep(after_s)
    ran = process.poll() is None
    process.kill()
    process.wait()
    killed = time.monotonic()
    while time.monotonic() < killed + 10:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return ran, time.monotonic() - killed
        time.sleep(0.05)
    return ran, float("inf")


def ids(folder: Path) -> Counter:
    """How often a folder's parts hold each sample."""
    parts = folder.glob("compute-*.parquet")
    return Counter(key for part in parts for key in pq.read_table(part, columns=["id"])["id"].to_pylist())


def unfinished(folder: Path) -> list[Path]:
    return list(folder.glob(".*.tmp"))


def differences(undisturbed: Counter, killed: Counter) -> list[str]:
    """What is wrong with the samples of the killed runs, in words."""
    [(reference, _)] = (undisturbed + killed).most_common(1)
    found = {
        "samples of the undisturbed run are missing": undisturbed.keys() - killed.keys(),
        "samples are there that the undisturbed run lacks": killed.keys() - undisturbed.keys(),
        "samples are there more than once": {key for key, n in killed.items() if n > 1} - {reference},
    }
    return [f"{len(keys)} {what}" for what, keys in found.items() if keys]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder for both datasets")
    parser.add_argument("--kills", type=int, default=20, help="(20)")
    parser.add_argument("--samples", type=int, default=4000, help="draws to measure, the N above (4000)")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 10**6, help="of the moments (from the time)"
    )
    parser.add_argument(
        "options", nargs="*", help="after --: options of measure, over this bench's toy sizes"
    )
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"{args.out} exists; give a new folder")
    undisturbed, killed = args.out / "undisturbed", args.out / "killed"
    first_s, whole_s = run(undisturbed, args.samples, args.options)
    until_s = 1.3 * first_s + (whole_s - first_s) / max(1, args.kills)
    print(
        f"seed {args.seed}; undisturbed: {whole_s:.0f} s, the first part after {first_s:.0f} s; "
        "kills within "
        f"{until_s:.0f} s\n",
        flush=True,
    )
    rng, rows, wrong, hits = random.Random(args.seed), [], [], 0
    for number in range(1, args.kills + 1):
        after_s = rng.uniform(0, until_s)
        ran, gone_s = kill(start(killed, args.samples, args.options), after_s)
        rows.append((number, f"{after_s:.1f}", f"{gone_s:.1f}", len(ids(killed)), len(unfinished(killed))))
        hits += ran
        wrong += [f"10 s after kill {number} its measuring process lived"] if gone_s > 10 else []
    for path in unfinished(killed):
        os.utime(path, (time.time() - 7200,) * 2)
    run(killed, args.samples, args.options)
    rows.append(("last", "", "", len(ids(killed)), len(unfinished(killed))))
    print(
        report.text_table(("kill", "after s", "children gone s", "samples there", "half-written files"), rows)
    )
    wrong += differences(ids(undisturbed), ids(killed))
    wrong += [f"{len(unfinished(killed))} half-written files are left"] if unfinished(killed) else []
    print(
        f"\nundisturbed: {len(ids(undisturbed))} samples; killed {args.kills} times, {hits} while it ran, "
        f"and resumed: {len(ids(killed))}; {'; '.join(wrong) or 'the same, each once'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
