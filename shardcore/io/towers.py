"""Towers: tables that belong together on a host, as a user gives them.

In a model with towers (DMT, arXiv 2403.00877), a module on each host combines the outputs of the host's
tables, and sends less than it received. search/decisions/towers.py chooses the hosts. step/kinds.py has the
bytes that then travel.

Shapes: M tables of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.core.validation import MOST_RATIO, require, short_repr
from shardcore.io.envelope import read_record

MOST_AFFINITY = (1e-100, 1e100)
"""Least and largest affinity other than 0, so that sums and shares of many stay finite."""


@dataclass(frozen=True)
class Towers:
    """Groups of tables that belong together, given explicitly or by an affinity matrix.

    compression_ratio: bytes that enter a tower module for each byte that leaves it, 1 or more.
    towers: groups of tables. Each group stays on one host. A host may have several.
    tables: [M] tables of the matrix.
    affinity: [M, M] degree to which two tables belong together, 0 or within MOST_AFFINITY. It is symmetric.
        The diagonal does not matter.

    Any other table is a group of its own, without affinity to others.
    """

    compression_ratio: float
    towers: tuple[tuple[str, ...], ...] = ()
    tables: tuple[str, ...] = ()
    affinity: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        require(
            1 <= self.compression_ratio <= MOST_RATIO,
            f"towers have compression_ratio {self.compression_ratio:g}; it needs 1 to {MOST_RATIO:,.0f}",
        )
        require(
            bool(self.towers or self.affinity),
            "towers have no 'towers' and no 'affinity'; they need "
            "groups of tables, or a matrix and its 'tables'",
        )
        for i, group in enumerate(self.towers):
            require(len(group) > 0, f"towers have an empty group, towers[{i}]; it needs one or more tables")
        in_groups = [name for group in self.towers for name in group]
        for names, words in (
            (in_groups, "in their groups; it needs to be in one, once"),
            (self.tables, "in 'tables'; it needs one row of the affinity"),
        ):
            for name, n in Counter(names).items():
                require(n == 1, f"towers have table {short_repr(name)} {n} times {words}")
        m = len(self.tables)
        require(
            len(self.affinity) == m,
            f"towers have an affinity of {len(self.affinity)} rows for {m} "
            "tables; it needs a row and a column for each",
        )
        for name, row in zip(self.tables, self.affinity, strict=True):
            require(
                len(row) == m,
                f"towers have an affinity with {len(row)} columns in the row of "
                f"{short_repr(name)}; it needs {m}, one for each of 'tables'",
            )
        self._require_valid_affinity()

    def _require_valid_affinity(self) -> None:
        """Raise ShardCoreError naming an entry of the affinity matrix that is negative, not finite or not symmetric."""
        a = self.affinity_matrix()
        low, high = MOST_AFFINITY
        for wrong, ought in (
            (~((a == 0) | (a >= low) & (a <= high)), f"0, or {low:g} to {high:g}"),
            (np.abs(a - a.T) > 1e-9 * np.maximum(a, a.T), "to be symmetric"),
        ):
            if wrong.any():
                i, j = (int(x) for x in np.argwhere(wrong)[0])
                one, two = short_repr(self.tables[i]), short_repr(self.tables[j])
                other = f", and {a[j, i]:g} of {two} and {one}" * ("symmetric" in ought)
                raise ShardCoreError(
                    f"towers have affinity {a[i, j]:g} of {one} and {two}{other}; it needs {ought}"
                )

    def with_renamed_tables(self, names: Mapping[str, str]) -> Towers:
        """Copy of the towers with other names for some tables."""

        def new_names(tables: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in tables)

        return replace(self, towers=tuple(map(new_names, self.towers)), tables=new_names(self.tables))

    def affinity_matrix(self) -> np.ndarray:
        """[M, M] affinity of each pair of the M tables."""
        return np.array(self.affinity, dtype=float).reshape(len(self.tables), len(self.tables))


def read_towers(path: str | Path, problem: Problem | None = None) -> Towers:
    """Read the towers of a file. Raises ShardCoreError naming the file and what is wrong in it.

    problem: problem that has to have all tables of the file. None: not checked here.
    """
    towers = read_record(Towers, path, "towers")
    named = {*towers.tables, *(name for group in towers.towers for name in group)}
    unknown = sorted(named - {table.name for table in problem.tables}) if problem else []
    if problem and unknown:
        raise ShardCoreError(
            f"{path} has table {short_repr(unknown[0])}, which problem {problem.name!r} does not have"
        )
    return towers
