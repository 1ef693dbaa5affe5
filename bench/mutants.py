"""Would the tests notice? One-line defects, each applied to a copy of the project and run against the tests
that could notice it.

bench/defects/*.toml list the defects: `file`, `old` (which occurs once in it), `new`, `tests` (the fewest
that should notice) and `says` (what is wrong then); `survives` says why no test can notice one. With --drawn
N, N more are drawn from the code itself: a comparison turned, a term's sign, a constant, a condition, a
statement or an argument left out; the tests that import the module, or one that imports it, run against them.
Some of those change nothing that a test could see, so their score is a floor.

A defect is caught where a test fails, hangs until its time limit, or crashes.
First the tests run without a defect: they must pass. What
was done is kept in --out, and is done again only where the code or its tests changed. Exit code 1 where a
listed defect survives that gives no reason, or more than 5% survive in all.

  make mutants                                                    the listed ones, as many at a time as there
                                                                  are cores
  python -m bench.mutants --out FILE.jsonl --only cost            those whose file or words hold "cost"
  python -m bench.mutants --out FILE.jsonl --drawn 100 --seed 7   100 drawn ones as well
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from shardcore import report
from shardcore.core.jit import copy_compiled

ROOT = Path(__file__).parents[1]
LISTED = Path(__file__).parent / "defects"
HEADERS = ("package", "defects", "caught", "survived", "of these explained", "score")
MOST_SURVIVING = 0.05
LIMIT_S = 900
"""For the tests of one defect; they have limits of their own, and a hang counts as caught."""
CAUGHT, SURVIVED = "caught", "survived"


@dataclass(frozen=True)
class Defect:
    """file: path in the project. old, new: text in it. tests: pytest arguments. says: what is wrong with it.
    survives: why no test can notice. drawn: not listed, but drawn from the code."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    says: str
    survives: str = ""
    drawn: bool = False

    def applied(self) -> str:
        """The file's text with the defect. Raises ValueError where `old` does not occur exactly once."""
        text = (ROOT / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {found} times; it has to occur once")
        if self.old == self.new:
            raise ValueError(f"{self.file}: {self.old!r} is not changed")
        return text.replace(self.old, self.new)

    @property
    def package(self) -> str:
        head, *rest = Path(self.file).parts
        return f"{head}/{rest[0]}" if len(rest) > 1 else head

    def key(self) -> str:
        """Changes with the defect, its file and its tests."""
        files = [self.file, *{test.partition("::")[0] for test in self.tests}]
        content = [(ROOT / f).read_text() for f in sorted(files)]
        return hashlib.sha256(json.dumps([asdict(self), content]).encode()).hexdigest()[:16]


def listed() -> list[Defect]:
    """The defects of bench/defects/, as they are written there."""
    entries = [e for path in sorted(LISTED.glob("*.toml")) for e in tomllib.loads(path.read_text())["defect"]]
    return [Defect(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def refused(defects: Sequence[Defect]) -> list[str]:
    """Why defects cannot be applied to the project as it is: a line for each that cannot."""
    found = []
    for defect in defects:
        try:
            defect.applied()
        except (OSError, ValueError) as error:
            found.append(str(error))
        found += [
            f"{defect.file}: {defect.says}: there is no {test}" for test in defect.tests if not _is_test(test)
        ]
    return found


def _is_test(test: str) -> bool:
    """Whether there is a file, or a function of a file, that pytest is given."""
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and (
        not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
    )


# --- drawn from the code ------------------------------------------------------------------------------------

_TURNED = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may be wrong with an expression or statement: words, and the node that stands there instead."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
        yield (
            "a comparison is turned",
            ast.Compare(node.left, [_TURNED[type(node.ops[0])]()], node.comparators),
        )
    elif isinstance(node, ast.BinOp) and type(node.op) in _TURNED:
        yield "another operator", ast.BinOp(node.left, _TURNED[type(node.op)](), node.right)
        yield "a term is left out", node.left
    elif isinstance(node, ast.BoolOp):
        yield "and and or are exchanged", ast.BoolOp(_TURNED[type(node.op)](), node.values)
        yield "a condition is left out", node.values[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "a not or a sign is left out", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield (
            "another constant",
            ast.Constant(not node.value if isinstance(node.value, bool) else 2 * node.value + 1),
        )
    elif isinstance(node, ast.IfExp):
        yield "the branches are exchanged", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        yield (
            "two arguments are exchanged",
            ast.Call(node.func, [*node.args[1::-1], *node.args[2:]], node.keywords),
        )
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg:
        yield "an argument is left out", ast.Call(node.func, node.args, node.keywords[:-1])
    elif (
        isinstance(node, ast.AugAssign | ast.Raise)
        or isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
    ):
        yield "a statement is left out", ast.Pass()


_WORDS = re.compile(
    r"logger|log\(|print\(|add_argument|ArgumentParser|help=|describe|description|_artifact|Error\("
)
"""What only people read: a defect there is no test's to notice."""


def drawn(rng: random.Random, count: int) -> list[Defect]:
    """Defects of random nodes of random lines, over all packages alike."""
    files = [
        p for top in ("shardcore", "tasks") for p in (ROOT / top).rglob("*.py") if p.name != "__init__.py"
    ]
    by_package = defaultdict(list)
    for path in files:
        by_package[path.parent].append(path)
    found: dict[tuple[str, str], Defect] = {}
    while len(found) < count:
        path = rng.choice(rng.choice(list(by_package.values())))
        text = path.read_text()
        nodes = [n for n in ast.walk(ast.parse(text)) if getattr(n, "lineno", 0) and n.lineno == n.end_lineno]
        lines = text.splitlines(keepends=True)
        node = rng.choice(nodes)
        options = list(changes(node))
        line = lines[node.lineno - 1]
        if not options or _WORDS.search(line) or text.count(line) > 1:
            continue
        words, other = rng.choice(options)
        raw = line.encode()
        mended = (
            raw[: node.col_offset]
            + f"({ast.unparse(other)})".encode() * (not isinstance(other, ast.Pass))
            + b"pass" * isinstance(other, ast.Pass)
            + raw[node.end_col_offset :]
        ).decode()
        name = str(path.relative_to(ROOT))
        tests = tests_of(name)
        try:
            defect = Defect(name, line, mended, tests, f"line {node.lineno}: {words}", drawn=True)
            compile(defect.applied(), name, "exec")
        except (SyntaxError, ValueError):
            continue
        if tests:
            found[name, line] = defect
    return list(found.values())


def tests_of(file: str) -> tuple[str, ...]:
    """The test files that import a module, or one that imports it; its own first."""
    name = Path(file).stem
    near = {file, *importers(file, "shardcore"), *importers(file, "tasks")}
    found = {
        test for module in near for test in importers(module, "tests") if Path(test).name.startswith("test_")
    }
    direct = set(importers(file, "tests"))
    return tuple(sorted(found, key=lambda test: (f"test_{name}.py" not in test, test not in direct, test)))


def importers(file: str, top: str) -> list[str]:
    """The files of a folder that import a module."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = re.compile(
        rf"from {re.escape(module)} import|import {re.escape(module)}\b|"
        rf"from {re.escape(package)} import (?:\([^)]*?|[^(\n]*?)\b{name}\b"
    )
    return [
        str(p.relative_to(ROOT)) for p in sorted((ROOT / top).rglob("*.py")) if imports.search(p.read_text())
    ]


# --- running ------------------------------------------------------------------------------------------------


def copy_project(folder: Path) -> None:
    """What git knows of the project, and what numba compiled."""
    named = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    ).splitlines()
    for name in named:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    copy_compiled(ROOT / "shardcore", folder / "shardcore")
    commit = ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "copy"]
    for command in (["init", "-q"], ["add", "-A"], commit):
        subprocess.run(["git", *command], cwd=folder, check=True)


def run_tests(folder: Path, tests: Sequence[str], *options: str) -> tuple[bool, str]:
    """Whether they pass in a copy, and the line that says what failed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--tb=line",
        *options,
        *tests,
    ]
    # Compiled files keep their source's time to the second, which no two defects share: a run takes longer.
    env = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"no end within {LIMIT_S} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # what a test left, too
        except ProcessLookupError:
            pass
    lines = [line for line in said.splitlines() if line.strip()]
    if process.returncode > 2:  # 2: a module does not import any more, or a test asked to stop
        raise RuntimeError(
            f"pytest ended with exit code {process.returncode} for {' '.join(tests)}:\n"
            + "\n".join(lines[-15:])
        )
    if process.returncode < 0:
        return False, f"ended by {signal.Signals(-process.returncode).name}"
    failed = next(
        (line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else ""
    )
    return process.returncode == 0, failed[:300]


class Copies:
    """Copies of the project, each used by one thread at a time."""

    def __init__(self, folder: Path, count: int):
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(count):
            copy_project(folder / f"copy-{i}")
            self._free.put(folder / f"copy-{i}")

    def judge(self, defect: Defect) -> dict:
        """Apply a defect, run its tests, take it back."""
        folder = self._free.get()
        path = folder / defect.file
        before, stat = path.read_bytes(), path.stat()
        try:
            path.write_text(defect.applied())
            passed, said = run_tests(folder, defect.tests)
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # or numba compiles all of it again
            self._free.put(folder)
        return {
            "key": defect.key(),
            "file": defect.file,
            "says": defect.says,
            "new": defect.new.strip(),
            "drawn": defect.drawn,
            "package": defect.package,
            "survives": defect.survives,
            "result": SURVIVED if passed else CAUGHT,
            "by": said,
        }


def table(rows: Sequence[dict]) -> list[tuple]:
    """A row for each package, and one for all."""
    packages = sorted({r["package"] for r in rows})

    def count(name: str, some: Sequence[dict]) -> tuple:
        left = [r for r in some if r["result"] == SURVIVED]
        return (
            name,
            len(some),
            len(some) - len(left),
            len(left),
            sum(bool(r["survives"]) for r in left),
            f"{100 * (1 - len(left) / len(some)):.0f}%",
        )

    return [*(count(p, [r for r in rows if r["package"] == p]) for p in packages), count("all", rows)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="a line of JSON for each defect; what is there is not done again",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="defects whose file or words hold this")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="draw so many from the code as well (0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="defects at a time (all cores)"
    )
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    defects = listed()
    if lines := refused(defects):
        print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
        return 2
    defects += drawn(random.Random(args.seed), args.drawn)
    defects = [d for d in defects if args.only in d.file or args.only in d.says]
    done = (
        {r["key"]: r for r in map(json.loads, args.out.read_text().splitlines())} if args.out.exists() else {}
    )
    left = [d for d in defects if d.key() not in done]
    for defect in left:  # one that is not Python would be caught, whatever the tests are
        if defect.file.endswith(".py"):
            compile(defect.applied(), defect.file, "exec")
    tests = sorted({t for d in left for t in d.tests})
    print(f"{len(defects)} defects, {len(defects) - len(left)} done before", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(args.jobs) as threads:
        copies = Copies(Path(folder), args.jobs)
        if left:
            print(f"{len(tests)} test files and tests without a defect ...", flush=True)
            passed, said = run_tests(Path(folder) / "copy-0", tests, "-n", str(args.jobs))
            if not passed:
                print(f"error: the tests fail without a defect: {said}", file=sys.stderr)
                return 2
        with open(args.out, "a") as out:
            for i, judged in enumerate(
                as_completed([threads.submit(copies.judge, defect) for defect in left])
            ):
                row = judged.result()
                done[row["key"]] = row
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(f"{i + 1} of {len(left)}: {row['result']}: {row['file']}: {row['says']}", flush=True)
    rows = [done[d.key()] for d in defects]
    given = [r for r in rows if not r["drawn"]]
    for words, some in (("listed", given), ("drawn", [r for r in rows if r["drawn"]])):
        if some:
            print(f"\n{words}:\n{report.text_table(HEADERS, table(some))}")
    survivors = [r for r in rows if r["result"] == SURVIVED]
    for r in survivors:
        print(
            f"survived: {r['file']}: {r['says']}: "
            f"{r['new']!r}{' - ' + r['survives'] if r['survives'] else ''}"
        )
    bad = [r for r in given if r["result"] == SURVIVED]
    return 1 if any(not r["survives"] for r in bad) or len(bad) > MOST_SURVIVING * len(given) else 0


if __name__ == "__main__":
    sys.exit(main())
