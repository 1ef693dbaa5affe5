"""Does any file make a reader fail other than with one clear line? Damaged files of every format, read as
users' commands do.

Each case takes a sound file, damages it (a value replaced by an odd one, a key lost or misspelt, bytes cut or
flipped; digests are then made right again, for they are no secret), reads it and uses what was read. It may
be

  refused     a ShardCoreError of one printable line of at most 300 characters
  accepted    what was read can be priced, at a finite cost of 0 or more, or what else the format promises
  nonsense    accepted, but it cannot be used so
  exception   any other exception; hang: no end within 20 s; crash: the process ended

The last four must not occur. A case is its format and its number: `--only FORMAT --first N --count 1` shows
one again.

  python -m bench.fuzz --out FILE.jsonl --count 1500      so many of each format; what FILE has is not done
                                                          again
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.fuzz_files import ROOT, Nonsense, Sound, make
from bench.fuzz_formats import FORMATS, Format
from shardcore import report
from shardcore.core.errors import MOST_CHARACTERS, ShardCoreError

LIMIT_S = 20
MEMORY_BYTES = 4 << 30
"""Of a process that reads, beside the libraries' own."""
OUTCOMES = ("refused", "accepted", "nonsense", "exception", "hang", "crash")


def judge(name: str, number: int, sound: Sound, folder: Path, damage: bool = True) -> dict[str, Any]:
    """One case: its outcome, and what was said."""
    one, rng = FORMATS[name], random.Random(f"{name} {number}")
    for part in one.parts:
        (shutil.copytree if (sound.folder / part).is_dir() else shutil.copy)(
            sound.folder / part, folder / part
        )
    if damage:
        one.damage(folder, rng)
    return {"format": name, "number": number, **used(one, sound, folder)}


def used(one: Format, sound: Sound, folder: Path) -> dict[str, str]:
    """Use a folder. Returns an outcome, and its message."""
    try:
        with _limited():
            one.use(folder, sound)
        return {"outcome": "accepted", "said": ""}
    except ShardCoreError as error:
        plain = str(error).isprintable() and len(str(error)) <= MOST_CHARACTERS and str(error)
        return {"outcome": "refused" if plain else "exception", "said": str(error).replace(str(folder), "")}
    except Nonsense as error:
        return {"outcome": "nonsense", "said": str(error)}
    except TimeoutError as error:
        return {"outcome": "hang", "said": str(error)}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error)[:200]} ({Path(frame.filename).name}:{frame.lineno})"
        return {"outcome": "exception", "said": said}


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"no end within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judged(name: str, numbers: Sequence[int], sound: Sound) -> Iterator[dict[str, Any]]:
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            yield judge(name, number, sound, Path(folder))


# --- running ------------------------------------------------------------------------------------------------


def work(name: str, numbers: Sequence[int], sound: Path) -> None:
    """Judge cases in this process, whose memory is limited; a line of JSON on stdout for each."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES,) * 2)
    known = Sound.read(sound)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        row = judge(name, 0, known, Path(folder), damage=False)
        if row["outcome"] != "accepted":
            raise SystemExit(f"{name} is {row['outcome']} without damage: {row['said']}")
    for row in judged(name, numbers, known):
        print(json.dumps(row), flush=True)


def run(name: str, numbers: Sequence[int], sound: Path) -> Iterator[dict[str, Any]]:
    """Judge cases in a process of their own, in another one after each that ends it."""
    left = list(numbers)
    while left:
        command = [
            sys.executable,
            "-m",
            "bench.fuzz",
            "--work",
            str(sound),
            "--only",
            name,
            "--numbers",
            json.dumps(left),
        ]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from rows
        left = left[len(rows) :]
        if left:
            said = (done.stderr.strip().splitlines() or [""])[-1][:200]
            yield {
                "format": name,
                "number": left.pop(0),
                "outcome": "crash",
                "said": f"exit code {done.returncode}: {said}",
            }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="a line of JSON for each case; what is there is not done again"
    )
    parser.add_argument("--only", choices=FORMATS, help="one format (all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each format (0)")
    parser.add_argument("--count", type=int, default=100, help="cases of each format (100)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.only, args.numbers, args.work)
        return 0
    rows = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out and args.out.exists()
        else []
    )
    known = {(r["format"], r["number"]) for r in rows}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as sound, open(args.out or os.devnull, "a") as out:
        make(Path(sound))
        for name in [args.only] if args.only else FORMATS:
            wanted = [n for n in range(args.first, args.first + args.count) if (name, n) not in known]
            for i in range(0, len(wanted), 500):
                for row in run(name, wanted[i : i + 500], Path(sound)):
                    rows.append(row)
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                print(
                    f"{name}: {min(i + 500, len(wanted))} of {len(wanted)}, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    counts = Counter((r["format"], r["outcome"]) for r in rows)
    table = [(name, *(counts[name, o] for o in OUTCOMES)) for name in FORMATS]
    total = ("all", *(sum(row[i + 1] for row in table) for i in range(len(OUTCOMES))))
    print(report.text_table(("format", *OUTCOMES), [*table, total]))
    bad = [r for r in rows if r["outcome"] not in ("refused", "accepted")]
    for r in bad[:50]:
        print(f"{r['outcome']}: --only {r['format']} --first {r['number']} --count 1: {r['said']}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
