"""Constraints of a plan, and the devices that its pins mean."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_DIM,
    MOST_PINS,
    convert_to_type,
    field_rules,
    first_duplicate,
    number_within,
    require,
    require_rules,
    short_repr,
    type_hints,
)

Pins = Mapping[str, tuple[int | str, ...]]
"""For some tables, the devices that they may live on: indices, or names of hosts for all of theirs."""
_FORMS = {
    "unsplit": '["t0"]',
    "pinned": '[("t0", [0, "host-1"])]',
    "together": '[["t0", "t1"]]',
    "kinds": '[("t0", ["row", "column"])]',
    "min_widths": '[("t0", 64)]',
}
"""Examples of each field, for messages."""


@dataclass(frozen=True)
class Constraints:
    """Constraints of a user on a plan.

    reserved_bytes: bytes kept free on every device for the dense part. Files of problems that lack it, and
      TorchRec's topologies, keep 15% of the smallest device.
    unsplit: names of tables that neither columns nor rows cut. Each is whole on one device, or on all as replicas.
    pinned: devices that some tables may live on: indices, or names of hosts for all of theirs.
    together: groups of tables that live on one device, whole.
    kinds: kinds of sharding that may run some tables. Any may run the others.
    min_widths: fewest columns of a shard of some tables. A table with fewer stays whole.
    """

    reserved_bytes: Annotated[int, number_within(0, MOST_BYTES)] = 0
    unsplit: tuple[str, ...] = ()
    pinned: tuple[tuple[str, tuple[int | str, ...]], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[tuple[str, tuple[str, ...]], ...] = ()
    min_widths: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "reserved_bytes", convert_to_type(self.reserved_bytes, int, "constraints.reserved_bytes")
        )
        require_rules(self, "constraints", field_rules(Constraints))
        for name, form in _FORMS.items():
            try:
                object.__setattr__(self, name, tuple(self._checked_entries(name)))
            except ShardCoreError as error:
                raise ShardCoreError(f"{error}, such as {form}") from None
        pairs = {"pinned": self.pinned, "kinds": self.kinds, "min_widths": self.min_widths}
        lists = (*self.pinned, *self.kinds, *(("together", group) for group in self.together))
        for name, entries in lists:
            require(
                len(entries) > 0, f"constraints have an empty list for {name!r}; it needs one or more entries"
            )
        for name, width in self.min_widths:
            require(
                1 <= width <= MOST_DIM,
                f"constraints have min_widths {width} for table {name!r}; it needs columns, 1 to {MOST_DIM}",
            )
        tables = {name: [table for table, _ in entries] for name, entries in pairs.items()}
        tables["together"] = [table for group in self.together for table in group]
        for name, named in tables.items():
            twice = first_duplicate(named)
            require(twice is None, f"constraints.{name} has table {twice!r} twice; it needs to be there once")
        kinds = tuple((table, tuple(dict.fromkeys(kinds))) for table, kinds in self.kinds)
        object.__setattr__(self, "kinds", kinds)

    def _checked_entries(self, name: str) -> Iterator[Any]:
        """Entries of a constraint field, each converted to its annotated type. Raises ShardCoreError naming the
        table."""
        value, what = getattr(self, name), f"constraints.{name}"
        kind, _ = get_args(type_hints(Constraints)[name])
        for entry in convert_to_type(value, tuple[Any, ...], what):
            if name in ("unsplit", "together"):
                yield convert_to_type(entry, kind, f"an entry of {what}")
                continue
            is_pair = isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)
            require(is_pair, f"{what} is {short_repr(value)}; it needs to be a list")
            yield entry[0], convert_to_type(entry[1], get_args(kind)[1], f"{what} of table {entry[0]!r}")

    def restricted_to(self, names: Collection[str]) -> Constraints:
        """The constraints restricted to some tables of a problem."""
        return Constraints(
            self.reserved_bytes,
            tuple(name for name in self.unsplit if name in names),
            tuple(entry for entry in self.pinned if entry[0] in names),
            tuple(filter(None, (tuple(name for name in group if name in names) for group in self.together))),
            tuple(entry for entry in self.kinds if entry[0] in names),
            tuple(entry for entry in self.min_widths if entry[0] in names),
        )


def allowed_devices_by_table(
    pins: Pins, together: Iterable[Sequence[str]], on_hosts: Mapping[str, Sequence[int]], what: str
) -> dict[str, tuple[int, ...]]:
    """Allowed devices, ascending, of each pinned table and of each table kept together with a pinned table.

    together: groups of tables that live on one device.
    on_hosts: the devices of each host.
    what: the problem, for messages.

    Raises ShardCoreError for a pin to a device or host that does not exist, for a group without a device in
    common, and for pins that mean more than MOST_PINS devices in all.
    """
    n_devices = sum(map(len, on_hosts.values()))
    # Equal pins share one set: there may be a million.
    sets: dict[Any, frozenset[int]] = {}
    left = MOST_PINS

    def add_device_set(key: Any, devices: frozenset[int]) -> None:
        nonlocal left
        sets[key], left = devices, left - len(devices)
        require(
            left >= 0,
            f"{what} pins tables to sets of more than {MOST_PINS} devices in all; it needs fewer or smaller ones",
        )

    for name, where in pins.items():
        if where in sets:
            continue
        entries = dict.fromkeys(where)  # a host may be named a thousand times
        for w in entries:
            require(
                w in on_hosts if isinstance(w, str) else 0 <= w < n_devices,
                f"{what} pins table {name!r} to {w!r}; its devices are 0 to {n_devices - 1}, "
                f"its hosts {', '.join(list(on_hosts)[:5])}",
            )
        add_device_set(
            where, frozenset(d for w in entries for d in (on_hosts[w] if isinstance(w, str) else (w,)))
        )
    own = {name: sets[where] for name, where in pins.items()}
    for group in together:
        of_group = frozenset(own[name] for name in group if name in own)
        if not of_group:
            continue
        if of_group not in sets:
            add_device_set(of_group, frozenset.intersection(*of_group))
        if not sets[of_group]:
            pinned = ", ".join(f"{n!r} to {list(pins[n])}" for n in group if n in pins)
            raise ShardCoreError(
                f"{what} keeps tables {list(group[:5])} together but pins {pinned}; they need a device in common"
            )
        own.update(dict.fromkeys(group, sets[of_group]))
    rising = {devices: tuple(sorted(devices)) for devices in set(own.values())}
    return {name: rising[devices] for name, devices in own.items()}


def require_tower_domains(
    devices_of: Mapping[str, tuple[int, ...]], domains: Sequence[Sequence[int]], domain: str, what: str
) -> None:
    """Raise ShardCoreError unless a job with towers can exchange outputs within its hosts (or pods) before crossing
    between them.

    devices_of: devices where each table with pooled outputs may live.
    domains: the devices of each.
    domain: "host" or "pod".
    """
    require(
        len(domains) > 1,
        f"{what} has 1 {domain}; towers need 2 or more, for they make smaller what crosses {domain}s",
    )
    sizes = sorted({len(devices) for devices in domains})
    require(
        len(sizes) == 1,
        f"{what} has {domain}s of {sizes[0]} to {sizes[-1]} devices; towers need as many on each",
    )
    domain_of = {d: i for i, devices in enumerate(domains) for d in devices}
    # Many tables share one set of devices.
    several = {where for where in set(devices_of.values()) if len({domain_of[d] for d in where}) > 1}
    for name, where in devices_of.items() if several else ():
        require(
            where not in several,
            f"{what} has job.tower_ratio, but table {name!r} may live on several "
            f"{domain}s; it needs constraints.pinned to one of them (plan --towers finds which)",
        )
