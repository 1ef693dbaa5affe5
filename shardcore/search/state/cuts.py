"""Cuts: how far each table has to be cut to fit on some device, beside the local batch only.

Shapes: D devices, P phases of a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import takewhile

import numpy as np

from shardcore.core.progress import ticking
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.search.state.shards import (
    Bundle,
    bundles,
    division,
    equal_parts,
    fixed_placements,
    searched_tables,
    why_not,
)
from shardcore.step.id_bytes import sample_bytes
from shardcore.step.kinds import WHOLE_ROWS, run_of, shards_on
from shardcore.step.memory import held_bytes
from shardcore.step.memory_account import Account
from shardcore.step.shard_memory import run_batches


class Cuts:
    """Cuts of a problem's tables.

    fixed: placements that every plan has.
    bundles: all other tables, whole.
    batches: each run's share of a local batch, with these tables whole. Empty if none may be.
    account: memory of plans with these tables whole. Only with batches.
    cut_account: the same with all of them cut by columns.
    may_hold: [D] bytes that devices may hold, without those of `fixed`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.fixed = problem, fixed_placements(problem)
        self.may_hold = held_bytes(problem)
        self.bundles = bundles(map(Shard.whole, searched_tables(problem)), problem)
        # Only tables that constraints let run with whole rows: others have no share in such an op.
        whole = [
            Placement(WHOLE_ROWS.name, s, (0,))
            for bundle in ticking(self.bundles)
            for s in bundle
            if why_not(WHOLE_ROWS, s.table, problem) is None
        ]
        self.batches = run_batches([*whole, *self.fixed], problem)
        if self.batches:
            self.account = Account.of(self.batches, problem)
            # A table that does not fit whole is cut, and then its run joins outputs.
            cut = {run: replace(batch, cut=not run.local_batch) for run, batch in self.batches.items()}
            self.cut_account = Account.of(cut, problem)
            self._room = self.room(self.account)
            # Messages compare with what is left in the phase in which fixed tables take most.
            of_fixed = self.account.loads(self.fixed).max(1)
            self.may_hold = [n - math.ceil(taken) for n, taken in zip(self.may_hold, of_fixed, strict=True)]

    def shards(self) -> list[Shard] | None:
        """All tables, whole or cut as little as possible. None: they do not fit so."""
        if self.batches:
            # All devices together hold the sum, and each holds the tables on all devices.
            too_much = (self._together > np.maximum(self._room, 0).sum(0) * (1 + 1e-9)).any()
            if too_much or (self.fixed and (self._room < -0.5).any()):
                return None
        all_parts = list(takewhile(len, self.parts()))
        fits = len(all_parts) == len(self.bundles) and self._make_equally_wide(all_parts)
        return [s for parts in all_parts for s in parts] if fits else None

    def parts(self) -> Iterator[Sequence[Shard]]:
        """For each bundle: its tables whole where they fit on some device, else cut. Empty where no cut fits.

        Each table is looked at alone. Whether all fit together is for searches to find.
        """
        for bundle, vector in zip(self.bundles, self._vectors, strict=True):
            table = bundle[0].table
            fits = vector is not None and self._has_room(table, vector, self._room)
            yield bundle if fits and table.dim <= self.problem.topology.most_columns else self._cut(bundle)

    @cached_property
    def _vectors(self) -> list[np.ndarray | None]:
        """[P] bytes that a device has of each bundle by columns. None if some table may not be whole or cut so."""
        return [
            bytes_by_columns(bundle, self.account)
            if all(why_not(WHOLE_ROWS, s.table, self.problem) is None for s in bundle)
            else None
            for bundle in ticking(self.bundles)
        ]

    @property
    def _together(self) -> np.ndarray:
        """[P] bytes of all bundles that may be whole or cut by columns."""
        return sum((v for v in self._vectors if v is not None), np.zeros(self._room.shape[1]))

    def room(self, account: Account) -> np.ndarray:
        """[D, P] bytes that devices have for shards, beside the local batch and fixed tables."""
        return account.limits - account.base - account.loads(self.fixed)

    def _make_equally_wide(self, all_parts: list[Sequence[Shard]]) -> bool:
        """Replace cut sequences by parts of one width in a collection, as TorchRec needs. Tell if they fit so."""
        cut: dict[str, list[int]] = defaultdict(list)  # positions in all_parts, by collection
        for i, (first, *_) in enumerate(all_parts):
            if first.table.sequence and first.width < first.table.dim:
                cut[first.table.collection].append(i)
        for positions in cut.values():
            tables = [all_parts[i][0].table for i in positions]
            # Any wider, and the table that needs the narrowest parts would not fit.
            width = self._equal_width(tables, min(all_parts[i][0].width for i in positions))
            if width is None:
                return False
            for i, table in zip(positions, tables, strict=True):
                all_parts[i] = equal_parts(Shard.whole(table), table.dim // width)
        return True

    def _equal_width(self, tables: Sequence[Table], most: int) -> int | None:
        """The largest width, up to `most`, of parts that fit into which each of these tables may be cut."""
        return next((w for w in range(most, 0, -1) if all(self._fits_equally(t, w) for t in tables)), None)

    def _fits_equally(self, table: Table, width: int) -> bool:
        """Tell if a table may be cut into parts of a width that fit."""
        return (
            table.dim % width == 0
            and width % self.problem.unit_width(table) == 0
            and table.dim // width <= len(self.problem.allowed_devices(table.name))
            and self._fits(equal_parts(Shard.whole(table), table.dim // width))
        )

    def _cut(self, bundle: Bundle) -> Sequence[Shard]:
        """A table cut into shards that each fit on some device. Empty if no cut does that."""
        problem, table = self.problem, bundle[0].table
        if len(bundle) > 1 or table.name in problem.whole:
            return ()
        # Rows of a sequence are divided where that fits: column cuts bind all sequences to one width.
        divided, by_columns = division(table, problem), why_not(WHOLE_ROWS, table, problem) is None
        ranges = [s for _, s in shards_on(divided)] if divided and self._fits_divided(divided) else []
        if not by_columns or (table.sequence and ranges):
            return ranges
        if table.sequence:
            width = self._equal_width([table], table.dim // 2)
            return equal_parts(Shard.whole(table), table.dim // width) if width else []
        unit = problem.unit_width(table)
        # Twice as many parts each time, as long as the widest one is too large.
        cuts = (
            equal_parts(Shard.whole(table), 1 << k, unit) for k in range((table.dim // unit).bit_length())
        )
        return next((x for x in cuts if x[0].width <= problem.most_width(table) and self._fits(x)), ranges)

    def needs(self, parts: Sequence[Shard]) -> np.ndarray:
        """[P] bytes on a device of the widest of a table's parts, and of the ids that all parts send."""
        # Each part but the first sends the ids of a local batch once more, on every device.
        table, widest = parts[0].table, max(parts, key=lambda s: s.width)
        ids = (len(parts) - 1) * sample_bytes(table, self.problem.job) * self.problem.local_batch
        return self.cut_account.vector(run_of(WHOLE_ROWS.name, table), widest) + ids * self.cut_account.sent

    def _fits(self, parts: Sequence[Shard]) -> bool:
        """Tell if the parts of a table fit on some device, one at a time."""
        return self._has_room(parts[0].table, self.needs(parts), self.room(self.cut_account))

    def _has_room(self, table: Table, vector: np.ndarray, room: np.ndarray) -> bool:
        """Tell if a device where a table may live has room [D, P] for bytes [P]."""
        return bool((vector <= room[list(self.problem.allowed_devices(table.name))]).all(1).any())

    def with_division(self, divided: Placement) -> Account:
        """The account with a table's rows divided. It counts the table's outputs twice: whole, and divided."""
        return Account.of(self.batches | run_batches([divided], self.problem), self.problem)

    def _fits_divided(self, divided: Placement) -> bool:
        """Tell if each row range fits on its device."""
        account, devices = self.with_division(divided), list(divided.devices)
        return bool((account.loads([divided]) <= self.room(account))[devices].all())

    def needed(self, shards: Sequence[Shard], n_devices: int) -> int:
        """Bytes that tables by columns take on so many devices together, in the largest phase."""
        may_be_whole = [s for s in shards if why_not(WHOLE_ROWS, s.table, self.problem) is None]
        if not may_be_whole:
            return 0
        # Each device has the local batch.
        n_bytes = bytes_by_columns(may_be_whole, self.account) + n_devices * self.account.base
        return math.ceil(n_bytes[: self.account.phases].max())

    def lacking_together(self) -> int:
        """Bytes that all bundles lack on all devices together, in the phase in which they lack most."""
        if not self.batches:
            return 0
        # [P] room that is less than nothing on one device does not count against others.
        lacks = self._together - np.maximum(self._room, 0).sum(0)
        return math.ceil(lacks[: self.account.phases].max())


def bytes_by_columns(shards: Iterable[Shard], account: Account) -> np.ndarray:
    """[P] bytes that a device has of shards by columns."""
    return np.sum([account.vector(run_of(WHOLE_ROWS.name, s.table), s) for s in shards], axis=0)


@lru_cache(maxsize=2)  # a refusal explains those that the search began with
def cuts_of(problem: Problem) -> Cuts:
    """The cuts of a problem."""
    return Cuts(problem)
