"""Packing: plans that fit, whatever their step takes. For problems where a search's order of placing finds none.

With a way to run chosen for each table, the memory of a device in a phase of a step is a sum of bytes: of its shards,
and of a local batch, which is the same on all devices (step/memory.py). So shards are vectors of bytes, to be
packed into devices.

A pass places one table after another: whole where it fits, else cut to the widths of the gaps. The table for which
passes find no room comes first in the next ones, or runs in its next way. This is squeaky wheel optimization (Joslin
and Clements, JAIR 1999).

Shapes: D devices, S sites of a way, G devices of a site, P limits of a device, C counts of caches.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from shardcore.core.progress import iterate_with_progress
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.step import memory
from shardcore.step.id_bytes import id_bytes_per_sample
from shardcore.step.kinds import SHARDING_KINDS, ShardingKind, sharding_kind_for_table, shards_by_device
from shardcore.step.memory import CacheCounts, MemoryAccount, peak_bytes_function, shard_sums, usable_bytes
from shardcore.step.shard_memory import local_batch_shares
from shardcore.step.ways import (
    ShardBundle,
    bundle_shards,
    cut_into_equal_parts,
    reason_not_runnable,
    searched_tables,
    sharing_groups,
)

_PASSES, _FEW_PASSES = 12, 3
"""Pairs of passes from the first ways, at most and at least: with many tables a pass takes long."""
_PLACED = 300
"""Bundles placed in these, if there are so many."""
_STEPS = 8
"""Sizes of memory that are tried, to find how much devices lack."""
_AMPLE = float(1 << 50)
"""Bytes that are enough on any device."""


class BundleOption(NamedTuple):
    """One way to place a bundle (shards that stay together): kind of sharding, devices and widths.

    sharding_kind: its kind of sharding.
    sites: [S, G] the groups of devices where a part may be. By columns, each is a single device.
    widths: columns that a part may have, rising. The only width of a bundle stands for all of its tables.
    placements: of all parts on the first site. Of a table that is cut to gaps their number is not known: it is whole.
    """

    sharding_kind: ShardingKind
    sites: np.ndarray
    widths: Sequence[int]
    placements: tuple[Placement, ...] = ()

    def with_placements_of(self, bundle: ShardBundle) -> BundleOption:
        """Copy of the way with the placements of a bundle filled in."""
        known = len(bundle) == len(self.widths) == 1
        parts = cut_into_equal_parts(bundle[0], bundle[0].width // self.widths[0]) if known else bundle
        return self._replace(placements=tuple(map(self.placement_on_first_site, parts)))

    def placement_on_first_site(self, shard: Shard) -> Placement:
        """Placement of a shard on the first site of the way."""
        return Placement(self.sharding_kind.name, shard, tuple(self.sites[0].tolist()))


def _ways_to_run(bundle: ShardBundle, problem: Problem) -> Iterator[BundleOption]:
    """Ways to run a bundle that constraints allow: by columns, shared by groups, and sequences in equal parts."""
    table = bundle[0].table
    dim, block, most = table.dim, problem.column_block_width(table), problem.max_shard_width(table)
    devices = np.array(problem.allowed_devices(table.name))[:, None]
    by_columns = [
        sharding_kind
        for sharding_kind in SHARDING_KINDS.values()
        if sharding_kind.is_on_one_device
        and all(reason_not_runnable(sharding_kind, s.table, problem) is None for s in bundle)
    ]
    stays_whole = len(bundle) > 1 or table.name in problem.uncut_tables
    for sharding_kind in by_columns:
        if not (stays_whole or table.sequence):
            yield BundleOption(sharding_kind, devices, range(block, most + 1, block))
        elif dim <= problem.topology.max_shard_columns:
            yield BundleOption(sharding_kind, devices, (dim,))
    for sharding_kind in SHARDING_KINDS.values() if len(bundle) == 1 else ():
        if not sharding_kind.is_on_one_device and reason_not_runnable(sharding_kind, table, problem) is None:
            yield BundleOption(sharding_kind, np.array(sharing_groups(sharding_kind, table, problem)), (dim,))
    for sharding_kind in by_columns if table.sequence and not stays_whole else ():
        for n in range(2, min(dim // block, len(devices)) + 1):
            if dim // block % n == 0 and dim // n <= most:
                yield BundleOption(sharding_kind, devices, (dim // n,))


class _ChosenOptions:
    """A way for each bundle, and the bytes of the shards that follow from it.

    batches: share of each run in a local batch, as long as no table is cut to the widths of gaps.
    account: memory of plans with these.
    limits: [D, P] bytes that devices may have with a local batch. The last limit is that of a device's host.
    base: [P] bytes of a local batch, if some runs have tables that are cut.
    vectors: [G, P + C] bytes and counts on the devices of a site, of a bundle's part of some width.
    """

    def __init__(self, packings: Packings, ways: Sequence[BundleOption]) -> None:
        problem, self.packings, self.ways = packings.problem, packings, ways
        self.batches = local_batch_shares(
            (p for way in iterate_with_progress(ways) for p in way.placements), problem
        )
        self.account = MemoryAccount.from_batches(self.batches, problem)
        tiers, topology = problem.topology.memory, problem.topology
        of_hosts = np.full((len(topology), 1), float(tiers[0].bytes) if tiers else _AMPLE)
        self.limits = np.append(self.account.limits, of_hosts, 1)
        self.host = np.array([device.host for device in topology.devices])
        self.base, self.vectors = cache(self._local_batch_bytes), cache(self._bytes_on_site)

    def _local_batch_bytes(self, cut: frozenset[ShardingKind]) -> np.ndarray:
        """[P] bytes of a local batch if the tables of the runs `cut` are cut."""
        batches = {run: batch._replace(cut=batch.cut or run in cut) for run, batch in self.batches.items()}
        return np.append(MemoryAccount.from_batches(batches, self.packings.problem).base, 0.0)

    def id_bytes_of_part(self, i: int) -> np.ndarray:
        """[P] bytes of a bundle's ids in a local batch that each further part adds."""
        problem = self.packings.problem
        ids = problem.local_batch * id_bytes_per_sample(self.packings.bundles[i][0].table, problem.job)
        return np.append(ids * self.account.sent_id_batches, 0.0)

    def _bytes_on_site(self, i: int, width: int) -> np.ndarray:
        """[G, P + C] bytes and counts of `width` columns of a bundle on the devices of a site."""
        way, bundle, on_host = self.ways[i], self.packings.bundles[i], self.limits.shape[1] - 1
        first, *others = bundle
        total = np.zeros((way.sites.shape[1], on_host + 1 + len(self.packings.cache_counts)))
        # Columns are exchangeable, and ranges of rows are alike on all sites.
        for shard in bundle if others else [replace(first, col_hi=width)]:
            run = sharding_kind_for_table(way.sharding_kind.name, shard.table)
            for g, (_, part) in enumerate(shards_by_device(way.placement_on_first_site(shard))):
                sums = self.packings.sums(run, part)
                total[g, :on_host] += self.account.bytes_by_phase(run, sums)
                total[g, on_host] += sums.on_host
                total[g, on_host + 1 :] += self.packings.cache_counts.total_counts([(run, part)])
        # Each device of a host counts what all of them have there.
        host = self.host[way.sites[0]]
        total[:, on_host] = (host[:, None] == host) @ total[:, on_host]
        return total

    def fits_together(self, more_bytes: float) -> bool:
        """Tell if all bundles, uncut, fit the memory of all devices together, in each phase."""
        phases = self.account.phases
        needed = sum(self.vectors(i, way.widths[-1]).sum(0)[:phases] for i, way in enumerate(self.ways))
        # Room that is less than nothing on one device does not count against others.
        free = np.maximum(self.limits + more_bytes - self.base(frozenset()), 0).sum(0)[:phases]
        return bool((needed <= free * (1 + 1e-9)).all())

    def excess_bytes(self, load: np.ndarray, free: np.ndarray) -> np.ndarray:
        """[...] memory excess of devices with loads [..., P + C] and free bytes [..., P]."""
        lacks = load[..., : free.shape[-1]] - free
        if len(self.packings.cache_counts):
            lacks[..., : self.account.phases] += self.packings.cache_counts.padding_bytes(
                load[..., free.shape[-1] :]
            )[..., None]
        return lacks.max(-1)


@dataclass(eq=False)
class _PackingPass:
    """Loads of devices while bundles (shards that stay together) are placed one after another.

    choice: a way for each bundle.
    free: [D, P] bytes that devices may have beside the local batch.
    load: [D, P + C] bytes and counts of the shards that they have.
    cut: runs of tables that were cut to the widths of gaps.
    """

    choice: _ChosenOptions
    free: np.ndarray
    load: np.ndarray
    cut: frozenset[ShardingKind] = frozenset()

    @classmethod
    def empty_pass(cls, choice: _ChosenOptions, more_bytes: float | None) -> _PackingPass:
        """Pass in which nothing is placed yet."""
        free = choice.limits + (more_bytes or 0.0) - choice.base(frozenset())
        if more_bytes is not None:
            free[:, -1] = _AMPLE
        return cls(choice, free, np.zeros((len(free), free.shape[1] + len(choice.packings.cache_counts))))

    def place_bundle(self, i: int, full: bool) -> list[tuple[ShardBundle, np.ndarray]] | None:
        """Place a bundle in as few parts as fit. Returns parts and the site [G] of each; None if there is no room.

        full: whether a part goes to the fullest site that has room, or else to the emptiest.
        """
        bundle, sites, parts, column = self.choice.packings.bundles[i], self.choice.ways[i].sites, [], 0
        while (left := bundle[0].width - column) > 0:
            width, lacks = self._widest_fitting_part(i, sites, left, full)
            # Negative where there is room: the largest is of the fullest site that has some.
            best = int(np.where(lacks <= 0, lacks, -np.inf).argmax() if full else lacks.argmin())
            if lacks[best] > 0:
                return None
            self._add_part(sites[best], self.choice.vectors(i, width))
            whole = width == bundle[0].width
            part = bundle if whole else (replace(bundle[0], col_lo=column, col_hi=column + width),)
            parts.append((part, sites[best]))
            column += width
            # A second part on a device would be one shard with the first.
            sites = np.delete(sites, best, 0) if width < left else sites
            if not len(sites):
                return None
        if len(parts) > 1:
            # Further parts of a table add to the local batch of all devices.
            used = self.load[:, : self.choice.account.phases].any(1)
            if self.choice.excess_bytes(self.load[used], self.free[used]).max() > 0:
                return None
        return parts

    def site_excess_bytes(self, i: int, width: int, sites: np.ndarray) -> np.ndarray:
        """[S] largest memory excess on each site [S, G] if the site also had `width` columns of a bundle."""
        load = self.load[sites] + self.choice.vectors(i, width)
        return self.choice.excess_bytes(load, self.free[sites]).max(1)

    def _widest_fitting_part(
        self, i: int, sites: np.ndarray, left: int, full: bool
    ) -> tuple[int, np.ndarray]:
        """Most columns of a bundle, of `left`, that fit on some site, and [S] the memory excess of each site with them.

        The fewest columns where none fit.
        """
        way = self.choice.ways[i]

        widths = way.widths[: bisect_right(way.widths, left)]
        of_sites = self.site_excess_bytes(i, widths[-1], sites)
        if len(way.widths) > 1 and (of_sites.min() > 0 or widths[-1] < left):
            # Another part follows: it sends ids once more, and its run has to join outputs.
            cut = self.cut | {
                sharding_kind_for_table(way.sharding_kind.name, self.choice.packings.bundles[i][0].table)
            }
            self.free -= self.choice.id_bytes_of_part(i) + self.choice.base(cut) - self.choice.base(self.cut)
            self.cut = cut
            n = bisect_right(widths, 0, key=lambda width: self.site_excess_bytes(i, width, sites).min())
            widths = widths[: max(n, 1)]
            if not full:
                # As many parts, but even ones.
                widths = widths[: 1 + bisect_left(widths, left / math.ceil(left / widths[-1]))]
            of_sites = self.site_excess_bytes(i, widths[-1], sites)
        return widths[-1], of_sites

    def _add_part(self, site: np.ndarray, vectors: np.ndarray) -> None:
        """Add a part's bytes to the devices of a site."""
        self.load[site] += vectors
        if self.choice.packings.problem.topology.memory:
            on_host = self.free.shape[1] - 1
            for device in site:
                neighbours = self.choice.host == self.choice.host[device]
                self.load[neighbours, on_host] = self.load[device, on_host]


class Packings:
    """Searches for plans that fit memory, by bin packing.

    bundles: tables that go together.
    firsts: the first way of each.
    possible: whether each has one. Otherwise constraints leave some table no kind.
    first: the numbers of these, which are all 0.
    caches: those that shards may have. Each is as wide as its widest shard, so its bytes do not add up.
    searched_bundles: numbers of the bundles that are not `fixed_placements`.
    order: numbers of bundles: those with fewest sites first, and of these the largest.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bundles = bundle_shards(map(Shard.whole, problem.tables), problem)
        # With very many tables, to list all ways of each takes long.
        self.firsts = [
            way.with_placements_of(bundle)
            for bundle in iterate_with_progress(self.bundles)
            for way in islice(_ways_to_run(bundle, problem), 1)
        ]
        self.possible = len(self.firsts) == len(self.bundles)
        self.first = (0,) * len(self.bundles)
        self._ways = cache(
            lambda i: [
                way.with_placements_of(self.bundles[i]) for way in _ways_to_run(self.bundles[i], problem)
            ]
        )
        self._choice = lru_cache(4)(self._make_choice)
        self._peak_bytes, self.sums = (
            peak_bytes_function(problem),
            cache(partial(shard_sums, problem=problem)),
        )

    def _make_choice(self, numbers: tuple[int, ...]) -> _ChosenOptions:
        return _ChosenOptions(
            self, [self._ways(i)[n] if n else self.firsts[i] for i, n in enumerate(numbers)]
        )

    @cached_property
    def cache_counts(self) -> CacheCounts:
        return CacheCounts.from_shards(
            (sharding_kind_for_table(way.sharding_kind.name, s.table), replace(part, col_lo=0, col_hi=width))
            for i, bundle in enumerate(self.bundles)
            for s in bundle
            if s.table.shares_cache
            for way in self._ways(i)
            for width in (way.widths if len(bundle) == 1 else [s.width])
            for _, part in shards_by_device(way.placement_on_first_site(s))
        )

    @cached_property
    def searched_bundles(self) -> list[int]:
        tables = set(searched_tables(self.problem))
        return [i for i, bundle in enumerate(self.bundles) if bundle[0].table in tables]

    @cached_property
    def placing_order(self) -> list[int]:
        """Order in which bundles of shards are placed: fewest sites first, then the largest."""
        ways = self._choice(self.first).ways
        size = [
            sum(self._peak_bytes(sharding_kind_for_table(way.sharding_kind.name, s.table), s) for s in bundle)
            for bundle, way in zip(iterate_with_progress(self.bundles), ways, strict=True)
        ]
        return sorted(range(len(size)), key=lambda i: (len(ways[i].sites), -size[i]))

    def _smallest_ways(self) -> tuple[int, ...]:
        """Number of the way to place each bundle that takes fewest bytes over all devices."""
        numbers = []
        for i, (shard, *_) in enumerate(iterate_with_progress(self.bundles)):
            # By columns and copied. Divided rows take no less: their outputs are as wide on each device.
            n_bytes = [
                len(way.sites[0])
                * self._peak_bytes(sharding_kind_for_table(way.sharding_kind.name, shard.table), shard)
                if way.widths[-1] == shard.width and not way.sharding_kind.divides_rows
                else np.inf
                for way in self._ways(i)
            ]
            numbers.append(int(np.argmin(n_bytes)))
        return tuple(numbers)

    def place_bundles_independently(self) -> list[Placement] | None:
        """Placements of all tables that are not `fixed_placements`, each placed as if it were the only table besides
        these.

        None if some find no room so, or if all do not fit together.
        """
        if not self.possible or not self._choice(self.first).fits_together(0.0):
            return None
        placements = list[Placement]()
        for i in iterate_with_progress(self.searched_bundles):
            if not (alone := self.place_bundle_independently(i)):
                return None
            placements += alone
        return placements if are_parts_equally_wide([(p.shard,) for p in placements]) else None

    def place_bundle_independently(self, i: int) -> list[Placement]:
        """Placements of a bundle, in equal parts, in its first way that has room next to `fixed_placements`.

        Empty if none has.
        """
        bundle, first, fixed = self.bundles[i], self.firsts[i], self._first_pass_with_fixed_tables
        if fixed and first.widths[-1] == bundle[0].width:
            if fixed.site_excess_bytes(i, bundle[0].width, first.sites).min() <= 0:
                return list(first.placements)
        for n, way in enumerate(self._ways(i)):
            fixed = self._pass_with_fixed_tables((*self.first[:i], n, *self.first[i + 1 :]))
            if fixed and (parts := fixed.place_bundle(i, False)):
                block = self.problem.column_block_width(bundle[0].table)
                return list(
                    map(
                        way.placement_on_first_site,
                        bundle if len(parts) == 1 else cut_into_equal_parts(bundle[0], len(parts), block),
                    )
                )
        return []

    @cached_property
    def _first_pass_with_fixed_tables(self) -> _PackingPass | None:
        return self._pass_with_fixed_tables(self.first)

    def _pass_with_fixed_tables(self, numbers: tuple[int, ...]) -> _PackingPass | None:
        """Pass with only the tables of `fixed_placements` placed. None if these find no room."""
        one_pass = _PackingPass.empty_pass(self._choice(numbers), None)
        fixed = sorted({*range(len(self.bundles))} - {*self.searched_bundles})
        return one_pass if all(one_pass.place_bundle(i, False) for i in fixed) else None

    def find_plan(self, n_passes: int, more_bytes: float | None = None) -> Plan | None:
        """Plan that fits, found by packing. None if no pass finds a plan.

        n_passes: pairs of passes from the first start. Later ones get fewer.
        more_bytes: what each device has more, if the memory of hosts does not count.
        """
        for k, start in enumerate(islice(self._starting_ways(), n_passes)):
            if not self._choice(start).fits_together(more_bytes or 0.0):
                continue
            numbers, blame, order = list(start), [0] * len(start), self.placing_order
            for _ in range(n_passes // (k + 1)):
                choice, failed = self._choice(tuple(numbers)), 0
                # Even loads, then full devices, which leave larger gaps on others.
                for full in (False, True):
                    found = self._place_all(choice, order, full, more_bytes)
                    if isinstance(found, Plan):
                        return found
                    failed = found
                blame[failed] += 1
                if order[0] == failed or blame[failed] % 2 == 0:
                    numbers[failed] = (numbers[failed] + 1) % len(self._ways(failed))
                order = sorted(self.placing_order, key=lambda i: -blame[i])
        return None

    def _starting_ways(self) -> Iterator[tuple[int, ...]]:
        """Numbers of ways to start packing from: first ways, smallest ways, and first ways but for one bundle."""
        yield self.first
        if (smallest := self._smallest_ways()) != self.first:
            yield smallest
        for i in self.placing_order:
            for n in range(1, len(self._ways(i))):
                yield (*self.first[:i], n, *self.first[i + 1 :])

    def _place_all(
        self, choice: _ChosenOptions, order: Sequence[int], full: bool, more_bytes: float | None
    ) -> Plan | int:
        """Plan with the chosen ways to run bundles, or the number of the bundle that finds no room."""
        one_pass, parts = _PackingPass.empty_pass(choice, more_bytes), []
        for i in iterate_with_progress(order):
            placed = one_pass.place_bundle(i, full)
            if placed is None:
                return i
            parts += [(choice.ways[i].sharding_kind.name, *of_site) for of_site in placed]
        placements = [Placement(kind, s, tuple(site.tolist())) for kind, part, site in parts for s in part]
        if are_parts_equally_wide([(p.shard,) for p in placements]):
            return Plan(tuple(placements))
        # TorchRec needs cut sequences of a collection equally wide, so the one with the widest parts runs otherwise.
        cut = [
            i
            for i in order
            if choice.ways[i].widths[0] < self.bundles[i][0].width and self.bundles[i][0].table.sequence
        ]
        return max(cut, key=lambda i: choice.ways[i].widths[0])


@lru_cache(maxsize=2)  # a refusal explains those that a search began with
def packings_of(problem: Problem) -> Packings:
    """Packings of a problem (searches for plans that fit memory), cached."""
    return Packings(problem)


@lru_cache(maxsize=8)
def least_excess_plan(problem: Problem, quick: bool = False) -> tuple[Plan | None, int]:
    """Plan that fits, or else the tried plan with the least memory excess, and the excess in bytes.

    quick: try few ways.

    The bytes are 0 or less if it fits. No plan: constraints leave a table no kind, or not even ample memory lets a
    pass place all tables.
    """
    packings = packings_of(problem)
    if not packings.possible:
        return None, 0
    # With many tables, a pass takes long, and the first ones nearly fill all devices.
    n_passes = max(_FEW_PASSES, min(_PASSES, _PLACED // len(packings.bundles)))
    n_passes = _FEW_PASSES if quick else n_passes
    # Where only hosts lack memory, their plan is one that fits the devices.
    best = packings.find_plan(n_passes)
    if problem.topology.memory:
        best = best or packings.find_plan(n_passes, 0.0)
    best = best or packings.find_plan(1, _AMPLE)
    if best is None:
        return None, 0
    low, high = 0, excess_bytes(best, problem)
    for _ in range(0 if quick else _STEPS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if plan := packings.find_plan(n_passes, middle):
            best, high = plan, excess_bytes(plan, problem)
        else:
            low = middle
    return best, high


def excess_bytes(plan: Plan, problem: Problem) -> int:
    """Largest memory excess of a device with a shard; 0 or less if the plan fits."""
    lacks = np.subtract(memory.used_bytes(plan, problem), usable_bytes(problem))
    return int(max(lacks[d] for placement in plan.placements for d in placement.devices))


def are_parts_equally_wide(parts: Sequence[ShardBundle]) -> bool:
    """Tell if all cut sequences of a collection have parts of one width, as TorchRec requires."""
    widths: dict[str, int] = {}
    return all(
        widths.setdefault(s.table.collection, s.width) == s.width
        for bundle in parts
        for s in bundle
        if s.table.sequence and s.width < s.table.dim
    )
