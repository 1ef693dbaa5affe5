"""What a user asks of a plan, and the devices that its pins mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_DIM,
    MOST_PINS,
    require,
    require_type,
    require_within,
    shown,
)

Pins = Mapping[str, Sequence[int | str]]
"""Of some tables, the devices that they may live on: indices, or names of hosts for all of theirs."""


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
    """What a user asks of a plan.

    reserved_bytes: kept free on every device, for what is no embedding. Nothing unless it is given: files of
      problems that lack it, and TorchRec's topologies, keep 15% of the smallest device.
    unsplit: names of tables that stay whole.
    pinned: of some tables, the devices that they may live on: indices, or names of hosts for all of theirs.
    together: groups of tables that live on one device, whole.
    kinds: of some tables, the kinds of sharding that may run them. Any may run the others.
    min_widths: of some tables, the fewest columns of a shard. A table with fewer stays whole.
    """

    reserved_bytes: int = 0
    unsplit: tuple[str, ...] = ()
    pinned: tuple[tuple[str, tuple[int | str, ...]], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[tuple[str, tuple[str, ...]], ...] = ()
    min_widths: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        require_type(self.reserved_bytes, int, "constraints.reserved_bytes", "a whole number")
        for name, form in _FORMS.items():
            value, pairs = getattr(self, name), name in ("pinned", "kinds", "min_widths")
            good = isinstance(value, (list, tuple)) and (
                not pairs
                or all(isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[0], str) for x in value)
            )
            require(good, f"constraints.{name} is {shown(value)}; it needs to be a list, such as {form}")
        for name in self.unsplit:
            require_type(name, str, "constraints.unsplit has a table that", "a table's name")
        object.__setattr__(self, "unsplit", tuple(self.unsplit))
        require_within(self, "constraints", reserved_bytes=(0, MOST_BYTES))
        for name, where in self.pinned:
            require(
                isinstance(where, (list, tuple))
                and len(where) > 0
                and all(isinstance(d, (int, str)) and not isinstance(d, bool) for d in where),
                f"constraints have table {name!r} pinned to {where!r}; it needs a list of one or more "
                "devices (such as 0) or hosts (such as 'host-0')",
            )
        for group in self.together:
            require(
                isinstance(group, (list, tuple))
                and len(group) > 0
                and all(isinstance(name, str) for name in group),
                f"constraints keep together {group!r}; it needs a list of one or more names of tables",
            )
        for name, kinds in self.kinds:
            require(
                isinstance(kinds, (list, tuple))
                and len(kinds) > 0
                and all(isinstance(kind, str) for kind in kinds),
                f"constraints run table {name!r} by {kinds!r}; it needs a list of one or more kinds, "
                "such as ['row', 'column']",
            )
        for name, width in self.min_widths:
            require(
                isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= MOST_DIM,
                f"constraints have min_widths {width!r} for table {name!r}; it needs a number of "
                f"columns, 1 to {MOST_DIM}",
            )
        object.__setattr__(
            self, "kinds", tuple((name, tuple(dict.fromkeys(kinds))) for name, kinds in self.kinds)
        )
        object.__setattr__(self, "min_widths", tuple(map(tuple, self.min_widths)))
        object.__setattr__(self, "pinned", tuple((name, tuple(where)) for name, where in self.pinned))
        object.__setattr__(self, "together", tuple(map(tuple, self.together)))
        for name in _twice(name for name, _ in self.pinned):
            raise ShardCoreError(f"constraints pin table {name!r} twice; it needs one list of its devices")
        for name in _twice(name for name, _ in self.kinds):
            raise ShardCoreError(f"constraints have kinds of table {name!r} twice; it needs one list of them")
        for name in _twice(name for name, _ in self.min_widths):
            raise ShardCoreError(f"constraints have min_widths of table {name!r} twice; it needs one number")
        for name in _twice(name for group in self.together for name in group):
            raise ShardCoreError(
                f"constraints keep table {name!r} together twice; it needs to be in one group, once"
            )

    def among(self, names: Collection[str]) -> Constraints:
        """Constraints of some of the tables."""
        together = (tuple(name for name in group if name in names) for group in self.together)
        pinned, kinds, min_widths = (
            tuple((name, value) for name, value in pairs if name in names)
            for pairs in (self.pinned, self.kinds, self.min_widths)
        )
        return Constraints(
            self.reserved_bytes,
            tuple(name for name in self.unsplit if name in names),
            pinned,
            tuple(filter(None, together)),
            kinds,
            min_widths,
        )


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, n in Counter(names).items() if n > 1]


def devices_of_pins(
    pins: Pins, together: Iterable[Sequence[str]], on_hosts: Mapping[str, Sequence[int]], what: str
) -> dict[str, tuple[int, ...]]:
    """Of each table that is pinned, or kept together with one that is, the devices where it may live, rising.

    together: groups of tables that live on one device.
    on_hosts: the devices of each host.
    what: the problem, for messages.

    Raises ShardCoreError for a pin to what does not exist, for a group without a device in common, and for
    pins that mean more than MOST_PINS devices in all.
    """
    _require_known(pins, on_hosts, what)
    sets: dict[Any, frozenset[int]] = {}
    left = MOST_PINS

    def once(key: Any, make: Callable[[], frozenset[int]]) -> frozenset[int]:
        """Equal pins share one set: there may be a million."""
        nonlocal left
        if key not in sets:
            sets[key] = make()
            left -= len(sets[key])
            require(
                left >= 0,
                f"{what} pins tables to sets of more than {MOST_PINS} devices in all; "
                "it needs fewer or smaller ones",
            )
        return sets[key]

    def meant(where: Sequence[int | str]) -> frozenset[int]:
        # A host may be named a thousand times.
        return frozenset(
            d for w in dict.fromkeys(where) for d in (on_hosts[w] if isinstance(w, str) else (w,))
        )

    own = {name: once(where, lambda w=where: meant(w)) for name, where in pins.items()}
    for group in together:
        if shared := frozenset(own[name] for name in group if name in own):
            common = once(shared, lambda s=shared: frozenset.intersection(*s))
            if not common:
                shown = ", ".join(f"{n!r} to {list(pins[n])}" for n in group if n in pins)
                raise ShardCoreError(
                    f"{what} keeps tables {list(group[:5])} together but pins {shown}; "
                    "they need a device in common"
                )
            own.update(dict.fromkeys(group, common))
    rising = {devices: tuple(sorted(devices)) for devices in set(own.values())}
    return {name: rising[devices] for name, devices in own.items()}


def _require_known(pins: Pins, on_hosts: Mapping[str, Sequence[int]], what: str) -> None:
    n_devices = sum(map(len, on_hosts.values()))
    for name, where in pins.items():
        for w in where:
            if not (w in on_hosts if isinstance(w, str) else 0 <= w < n_devices):
                raise ShardCoreError(
                    f"{what} pins table {name!r} to {w!r}; its devices are 0 to "
                    f"{n_devices - 1}, its hosts {', '.join(list(on_hosts)[:5])}"
                )


def require_tower_hosts(
    devices_of: Mapping[str, tuple[int, ...]], on_hosts: Sequence[Sequence[int]], what: str
) -> None:
    """Raise ShardCoreError unless outputs of a job with towers can be exchanged within hosts first.

    devices_of: where each table with pooled outputs may live.
    on_hosts: the devices of each host.
    """
    require(
        len(on_hosts) > 1,
        f"{what} has 1 host; towers need 2 or more, for they make smaller what crosses hosts",
    )
    sizes = sorted({len(devices) for devices in on_hosts})
    require(
        len(sizes) == 1, f"{what} has hosts of {sizes[0]} to {sizes[-1]} devices; towers need as many on each"
    )
    host_of = {d: h for h, devices in enumerate(on_hosts) for d in devices}
    # Many tables share one set of devices.
    several = {where for where in set(devices_of.values()) if len({host_of[d] for d in where}) > 1}
    for name, where in devices_of.items() if several else ():
        require(
            where not in several,
            f"{what} has job.tower_ratio, but table {name!r} may live on several "
            "hosts; it needs constraints.pinned to one of them (plan --towers finds which)",
        )
