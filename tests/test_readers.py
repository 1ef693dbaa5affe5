"""Every function that reads a file is in the registry that tests/test_fuzz.py walks, or reads no file of users."""

import ast
import functools
from pathlib import Path

import pytest
from fuzz_formats import FORMATS

ROOT = Path(__file__).parent.parent

DOOR = {
    "read_bytes",
    "read_text",
    "read_json",
    "read_yaml",
    "read_regular_file",
    "parse_json",
    "require_file",
    "open_document",
    "read_document",
    "read_record",
    "is_document",
    "read_model",
    "read_trained",
    "read_tensors",
}
RAW = {
    "open",
    "ParquetFile",
    "read_table",
    "read_csv",
    "safe_open",
    "memmap",
    "fromfile",
    "ZipFile",
    "json.load",
    "json.loads",
    "torch.load",
    "np.load",
    "yaml.load",
    "yaml.safe_load",
    "pickle.load",
    "pickle.loads",
    "tomllib.load",
    "tomllib.loads",
    "csv.reader",
    "csv.DictReader",
}
"""Calls that read."""

NO_FORMAT = {
    # Of the kernel.
    "shardcore/search/budget.py:usable_cores",
    # The door itself, and what is shared by all that goes through it.
    "shardcore/io/schema.py",
    "shardcore/io/envelope.py",
    # They only write, or lock.
    "tasks/processes.py:exclusive_lock",
    "shardcore/report/text.py:rounded_json",
    "shardcore/io/writing.py:_create_locked",
    "shardcore/io/writing.py:remove_unfinished",
    "shardcore/io/writing.py:_no_link",
    "shardcore/io/writing.py:require_writable",
    "shardcore/cli/__init__.py:main",
    "shardcore/plans/store.py:publishing_lock",
    "tasks/console.py:_redirect_output",
    # ShardCore's own files, as they were installed.
    "shardcore/core/jit.py:cache_folder",
    "shardcore/measure/sampling/placements.py:recorded_plans",
    "shardcore/report/plan_explorer.py:script_text",
    "shardcore/tables/public.py:_read_public_lists",
    "shardcore/tables/statistics.py:read_published_release",
    # The kernel's.
    "shardcore/measure/hosts.py:enter_network",
    "shardcore/measure/hosts.py:machine_id",
    "shardcore/measure/devices.py:product_name",
    "shardcore/measure/own_core.py:deprioritize_network_threads",
    # Lines of our own processes, a command's argument, and a value written and read again.
    "shardcore/torchrec/moves/agreement.py:_exchange_votes",
    "shardcore/torchrec/moves/checkpoint_files.py:finish",
    "shardcore/testing/decisions.py:test_the_ledger_goes_into_the_plan",
    "tasks/console.py:show_if_marked",
    "flows/refresh.py:parse_override",
    # It opens a browser.
    "shardcore/stages/screen.py:open_page",
    # It asks whether the plan is there; files.read_plan reads it.
    "shardcore/cli/published.py:_read_plan_and_problem",
    # It copies a page.
    "shardcore/cli/published.py:view",
    # Answers and tags of the stack's services.
    "tasks/model_history.py:_champion_changes",
    "tasks/publish_claim.py:_read_tag",
    # The card that the stage before wrote.
    "tasks/registry.py:register_model",
    # The stack's own files, in a folder that only its user may enter. Tests: tests/tasks/test_stack.py.
    "tasks/daemons.py",
    "tasks/lost_runs.py",
    "tasks/owned.py",
    "tasks/ray_cluster.py",
    "tasks/services.py",
    "tasks/stack.py",
    "tasks/stack_services.py",
}
"""Files, or functions of them, that call what reads and read no file that anybody may have written."""


LAST = DOOR | {name.rpartition(".")[2] for name in RAW}


def readers(text: str, file: str) -> set[str]:
    """FILE:FUNCTION of each outermost function that calls what reads; FILE: of a module itself."""
    found = set()

    def walk(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            inner = (owner or child.name) if is_function else owner
            called = getattr(child, "func", None)
            # Only then, for `unparse` takes long.
            if getattr(called, "attr", getattr(called, "id", None)) in LAST:
                name = ast.unparse(called)
                if name in RAW or name.rpartition(".")[2] in DOOR | {x for x in RAW if "." not in x}:
                    found.add(f"{file}:{inner}")
            walk(child, inner)

    walk(ast.parse(text), "")
    return found


@functools.cache
def all_readers() -> set[str]:
    return {
        reader
        for package in ("shardcore", "tasks", "flows")
        for path in (ROOT / package).rglob("*.py")
        for reader in readers(path.read_text(), str(path.relative_to(ROOT)))
    }


def test_every_reader_of_a_file_is_in_the_registry_of_the_fuzz():
    registered = {reader for one in FORMATS.values() for reader in one.readers}
    unknown = {r for r in all_readers() - registered if not {r, r.partition(":")[0]} & NO_FORMAT}
    assert not unknown


def test_the_registry_names_only_readers_that_there_are():
    registered = {reader for one in FORMATS.values() for reader in one.readers}
    assert registered <= all_readers() and not registered & NO_FORMAT


@pytest.mark.parametrize(
    "text, found",
    [
        ("def f(p):\n return json.loads(p.read_text())", {"x.py:f"}),
        ("class A:\n def g(self, p):\n  with gzip.open(p) as f: return f", {"x.py:g"}),
        ("def outer(p):\n def inner(): return np.load(p)\n return inner()", {"x.py:outer"}),
        ("value = schema.read_json('a')", {"x.py:"}),
        ("def f(): return json.dumps(load(1))", set()),
    ],
)
def test_a_new_reader_is_noticed(text, found):
    assert readers(text, "x.py") == found
