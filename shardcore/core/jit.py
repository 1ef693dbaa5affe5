"""Compilation of functions with numba, and the folder for compiled code.

Numba stores compiled code beside a function's file, and compiles again when that file changes.
It does not notice a change in another file whose functions were inlined.
So the cache folder is named after a digest of all compiled sources.
Import this module before anything is compiled.
"""

# Numba's decorators and configuration have no types.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core import codegen
from numba.core.caching import UserProvidedCacheLocator as Locator
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.dispatcher import Dispatcher
from numba.core.typed_passes import NativeLowering

from shardcore.core import progress
from shardcore.core.gc_pause import infrequent_gc

_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    "core/jit.py",
    "cost/compiled.py",
    "core/step_cost.py",
    "step/engine/*.py",
    "step/memory.py",
    "step/memory_timeline.py",
    "search/anneal/compiled/*.py",
)
_KEPT = 3
"""Number of cache folders to keep, one for each version of the sources."""

# error_model="numpy": a division by zero gives inf, and needs no check in inner loops.
# nogil: other threads, such as a progress line, run meanwhile.
OPTIONS = {"cache": True, "error_model": "numpy", "_nrt": False, "nogil": True, "no_cfunc_wrapper": True}
"""For functions that Python calls: kept on disk, no Python errors, no reference counts."""
_MAY_LINK = hasattr(getattr(codegen, "CPUCodeLibrary", None), "_finalize_final_module")
"""True if this numba can leave machine code out. If not, inner functions compile as usual, which takes longer."""


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringToLink(NativeLowering):
    """Lower a function to LLVM IR, without machine code. Its callers link this IR into theirs, and optimize it."""

    _name = "lowering_to_link"

    def run_pass(self, state: Any) -> bool:
        library = state.targetctx.codegen().create_library(state.func_id.func_qualname)
        library._optimize_final_module = lambda: None
        library._finalize_final_module = lambda: setattr(library, "_finalized", True)
        state.library, state.flags.no_compile = library, True
        super().run_pass(state)
        # numba tells compiled functions apart by their entry points, which have to be builtins. Nothing calls this one,
        # so any new builtin will do.
        state.cr = state.cr._replace(cfunc=[].append)
        state.targetctx.insert_user_function(state.cr.cfunc, state.cr.fndesc, [library])
        return True


class _CompilerToLink(Compiler):
    """numba's compiler with `_LoweringToLink` as its last step."""

    def define_pipelines(self) -> list[PassManager]:
        [passes] = super().define_pipelines()
        passes.passes = [(_LoweringToLink if p is NativeLowering else p, name) for p, name in passes.passes]
        return [passes]


def compile_inner(function: Callable) -> Dispatcher:
    """Decorator for a numba function that only other compiled functions call: no cache entry, no Python wrapper."""
    return njit(
        error_model="numpy",
        _nrt=False,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=_CompilerToLink if _MAY_LINK else Compiler,
    )(function)


def compile_entry(
    signature: numba.core.typing.Signature, convert: Callable[[Any], Any] = lambda value: value
) -> Callable[[Callable], Callable]:
    """Decorator for a numba function that Python calls: compiled for one signature, at the first call.

    Its attribute `ready` compiles it before.

    convert: applied to each argument of a call.
    """

    def compile_function(function: Callable) -> Callable:
        compiled = njit(**OPTIONS)(function)

        @functools.wraps(function)
        def call_compiled(*args: Any) -> Any:
            return compiled_for(compiled, signature)(*map(convert, args))

        call_compiled.ready = functools.partial(compiled_for, compiled, signature)
        return call_compiled

    return compile_function


def compiled_for(function: Dispatcher, signature: numba.core.typing.Signature) -> Dispatcher:
    """The numba function compiled for one signature only. Compile time is excluded from `progress.clock`."""
    if not function.signatures:
        module = function.py_func.__module__.rpartition(".")[2]
        index = f"{module}.{function.py_func.__qualname__}-*.nbi"
        if not any(Path(numba.config.CACHE_DIR).glob(f"*/{index}")):  # it is not on disk
            progress.report(progress.COMPILING)
        with progress.stopped_clock(), infrequent_gc():
            function.compile(signature)
        function.disable_compile()
    return function


def copy_compiled_code(package: Path, copy: Path) -> None:
    """Copy the package's cached machine code to a copy of the package with the same sources."""
    # Numba names subfolders after the path of the sources, which differs for the copy.
    made = cache_folder()
    for folder in {path.parent for pattern in _SOURCES for path in package.glob(pattern)}:
        source, target = (
            made / Locator.get_suitable_cache_subpath(str(f / "module.py"))
            for f in (folder, copy / folder.relative_to(package))
        )
        if source.exists():
            shutil.copytree(source, copy / "__pycache__" / made.name / target.name)


def cache_folder() -> Path:
    """Folder for the cache of compiled code: in the package's `__pycache__`, in the user's cache, or temporary.

    Numba runs what it finds there, so it is never one that others may change, as the current folder may be.
    """
    # A digest, not a time stamp: checkouts and copies change times.
    sources = sorted(path for pattern in _SOURCES for path in _PACKAGE.glob(pattern))
    name = f"numba-{hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:16]}"
    parents = (
        _PACKAGE / "__pycache__",
        Path(os.path.expanduser("~"), ".cache/shardcore"),  # "~" where there is no home
        Path(tempfile.gettempdir(), f"shardcore-numba-{os.geteuid()}"),
    )
    for folder in (parent / name for parent in parents if parent.is_absolute()):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_trusted_folder(folder.parent) and _is_trusted_folder(folder):
                folder.touch()  # those used last are kept
                # This one stays, whatever the times of others: a clock may have been ahead.
                for old in sorted(
                    {*folder.parent.glob("numba-*")} - {folder}, key=lambda path: -path.stat().st_mtime
                )[_KEPT - 1 :]:
                    shutil.rmtree(old, ignore_errors=True)
                return folder
    return Path(tempfile.mkdtemp(prefix="shardcore-numba-"))


def _is_trusted_folder(folder: Path) -> bool:
    """Tell if a path is a folder, not a link, which only root, this user or the package's owner may change."""
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and not found.st_mode & stat.S_IWOTH
        and found.st_uid in (0, os.geteuid(), _PACKAGE.stat().st_uid)
    )


# Numba reads this where a function is declared with cache=True.
numba.config.CACHE_DIR = str(cache_folder())
