"""The nouns: what each refuses, its defaults, and what follows from its fields."""

import dataclasses
import pickle
from dataclasses import replace

import numpy as np
import pytest
from refusals import INF, NAN, names, refused, rows

from shardcore.core import constraints, topology, types
from shardcore.core.access_statistics import HASH_FORMS, MOST_RANGES, ManagedCollision, Reuse, RowShares, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.job import PIPELINES, Job
from shardcore.core.links import Link, make_links
from shardcore.core.step_cost import StepCost
from shardcore.core.tiers import BELOW, DEVICE, TIERS, Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Problem, Setting, Shard, Table
from shardcore.io import measurements
from shardcore.step import lower
from shardcore.step.kinds import SHARDING_KINDS

GIB = 1 << 30
HOSTS = Topology((Device(1, host="a"), Device(1, host="a"), Device(1, host="b"), Device(1, host="b")))
T = Table("t", 10, 8, 1.0)
FOUR = tuple(Table(name, 10, 8, 1.0) for name in "stuv")


def table(**fields) -> Table:
    return replace(T, **fields)


def setting(hardware="x", batch=1, **fields) -> Setting:
    return Setting(hardware, batch, **fields)


def device(memory_bytes=1, **fields) -> Device:
    return Device(memory_bytes, **fields)


def link(level="within_host", **fields) -> Link:
    return Link(level, **fields)


def host_memory(tier="host", bytes=GIB, gbps=1.0) -> Memory:
    return Memory(tier, bytes, gbps)


def job(**fields) -> Job:
    return Job(**{"dense_forward_ms": 1.0, "dense_backward_ms": 1.0} | fields)


def collision(row_bytes=32, lookup_bytes=0, **fields) -> ManagedCollision:
    return ManagedCollision(row_bytes, lookup_bytes, **fields)


def problem_of(**fields) -> Problem:
    return Problem(**{"name": "p", "tables": FOUR, "topology": HOSTS, "global_batch": 4} | fields)


def constrained(**constraints) -> Problem:
    return problem_of(constraints=Constraints(**constraints))


def shard(*cells) -> Shard:
    return Shard(T, *cells)


def replicated(*devices) -> Placement:
    return Placement("data_parallel", Shard.whole(T), devices)


REFUSED = {
    table: {
        "name": ("", "a\nb", "x" * 201),
        "rows": (0, 2**40 + 1),
        "dim": (0, 6, 65540),
        "pooling": (-1.0, NAN, INF, 1e6 + 1),
        "features": (0,),
        "dedup": (0.9, NAN),
        "precision": ("fp8", "int8"),
        "tier": ("tape",),
    },
    setting: {
        "hardware": ("a/b", "x" * 101),
        "batch": (0, 2**40 + 1),
        "precision": ("fp8",),
        "optimizer": ("sgd",),
    },
    device: {"memory_bytes": (0, 2**50 + 1), "speed": (0.0, INF, NAN, 1001.0)},
    link: {"level": ("on_the_moon",), "gbps": (0.0, INF), "latency_ms": (-1.0, INF)},
    host_memory: {"tier": (DEVICE, "tape"), "bytes": (0,), "gbps": (0.0,)},
    job: {
        "pipeline": ("sparse_dust",),
        "dense_forward_ms": (-1.0,),
        "dense_backward_ms": (NAN,),
        "dense_mflops": (-1.0, INF),
        "id_bytes": (2,),
        "length_bytes": (0,),
        "forward_payload": ("int9", "int8-16", "mx4-6", "fp8-0", ""),
        "backward_payload": ("fp7", "fp8-"),
        "replica_optimizer": ("lamb",),
    },
    collision: {
        "row_bytes": (-1,),
        "lookup_bytes": ((1 << 20) + 1,),
        "bytes": (-1,),
        "buckets": (0, 2**20 + 1),
        "input_size": (-1,),
        "routing": ("sideways",),
        "form": ("cuckoo",),
    },
    problem_of: {"global_batch": (0,), "optimizer": ("adagrad",)},
    constrained: {"reserved_bytes": (-1, 2**50 + 1)},
}


@pytest.mark.parametrize("make, field, value", rows(REFUSED))
def test_a_value_that_cannot_be_is_named_with_its_field(make, field, value):
    assert names(refused(make, **{field: value}), field, value)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: table(access=Reuse((0.0,) * 17, 4)), "table 't' .*empty reuse histogram"),
        (lambda: table(dim=6), "table 't' .*multiple of 4"),
        (lambda: table(collection="a\nb"), "the collection of table 't'"),
        (lambda: table(features=0), "1 to 10,000"),
        (lambda: table(row_shares=RowShares((1.0,), (1.0,))), "'t' has row_shares and ordered false; it"),
        (lambda: Reuse((0.5,) * 17, 4), "8.5.*sum to 1"),
        (lambda: Reuse((0.998, *(0.0,) * 16), 4), "0.998.*sum to 1"),
        (lambda: Reuse((1.5, -0.5, *(0.0,) * 15), 4), "1.5, -0.5.*fractions"),
        (lambda: Reuse((1.0,), 4), "1 bins.*17 fractions"),
        (lambda: Reuse((1.0, *(0.0,) * 16), 0), "reuse histogram has batch 0"),
        (lambda: Zipf(-1), "alpha -1.0; it needs 0 to less than 10"),
        (lambda: Zipf(10), "alpha 10.0; it needs 0 to less than 10"),
        (lambda: Zipf(NAN), "alpha nan"),
        (lambda: RowShares((), ()), "have 0 lookups"),
        (lambda: RowShares((1.0,), (0.5, 0.5)), "1 lookups and 2 unique; they need as many of each"),
        (lambda: RowShares((0.5, 0.6), (0.5, 0.5)), "lookups that sum to 1.1; they need to be fractions"),
        (lambda: RowShares((0.5, 0.5), (1.5, -0.5)), "unique that sum to 1; they need to be fractions"),
        (lambda: RowShares((NAN, 1.0), (0.5, 0.5)), "lookups that sum to nan"),
        (lambda: RowShares((1 / (MOST_RANGES + 1),) * (MOST_RANGES + 1), (1.0,)), "have 4097 lookups"),
        (lambda: shard(0, 11, 0, 8), r"'t'.*\[0, 11\).*\[0, 10\)"),
        (lambda: shard(-1, 10, 0, 8), r"\[-1, 10\)"),
        (lambda: shard(4, 4, 0, 8), r"\[4, 4\)"),
        (lambda: shard(0, 10, 4, 4), r"\[4, 4\)"),
        (lambda: shard(0, 10, -4, 4), r"\[-4, 4\)"),
        (lambda: shard(0, 10, 4, 12), r"\[4, 12\).*\[0, 8\)"),
        (lambda: shard(0, 10, 0, 6), r"\[0, 6\).*multiples of 4"),
        (lambda: shard(0, 10, 2, 8), r"\[2, 8\).*multiples of 4"),
        (lambda: replicated(1, 1), r"\(1, 1\)"),
        (lambda: replicated(), r"\(\).*one or more"),
        (lambda: replicated(0, -1), r"\(0, -1\)"),
        (lambda: problem_of(tables=()), "no tables"),
        (lambda: problem_of(tables=(T, T)), "'p'.*'t'"),
        (lambda: problem_of(topology=Topology((Device(1),) * 3)), "global_batch 4.*3 devices"),
        (lambda: problem_of(name="../p"), "'../p'.*folder"),
        (lambda: setting(precision="fp16+fp8"), "precision 'fp16.fp8'; known are fp32, fp16, bf16"),
        (lambda: Topology(()), "no devices"),
        (lambda: Topology((Device(1),) * 65537), "65537 devices"),
        (lambda: Topology((Device(1),), "../x"), "hardware '../x'"),
        (lambda: Topology((Device(1),), memory=(host_memory(),) * 2), "memory of host, host"),
        (
            lambda: Topology((Device(1),), memory=(Memory("ssd", 1, 3.0), Memory("host", 1, 2.0))),
            "memory ssd of 3 GB/s a device and host of 2; ssd needs to be no faster",
        ),
        (lambda: Topology((Device(1),), links=(link(), link())), "of within_host, within_host.*at most one"),
        (lambda: device(host="\x1b[31m"), "device has host "),
        (lambda: Link("between_hosts", None, True), "shared True and gbps None"),
        (lambda: Link("within_host", 2.0, True), "within_host has shared True.*only links of hosts and pods"),
        (lambda: make_links(on_the_moon=2.0), "level 'on_the_moon'.*known are within_host, "),
        (lambda: Job(dense_forward_ms=1.0), "forward_ms 1.0 and dense_backward_ms None; it needs both"),
        (lambda: Job(dense_backward_ms=1.0), "dense_forward_ms None and dense_backward_ms 1.0"),
        (
            lambda: Job(dense_forward_ms=1.0, dense_backward_ms=2.0, dense_mflops=32.0),
            r"dense_forward_ms 1.0 and dense_backward_ms 2.0; .*neither with dense_mflops \(32.0\)",
        ),
        (lambda: constrained(unsplit=("x",)), r"'p'.*forbids splitting \['x'\]"),
        (lambda: constrained(pinned=(("x", (0,)),)), r"'p'.*pins \['x'\]"),
        (lambda: constrained(pinned=(("s", (0, 4)),)), "'s' to 4.*devices are 0 to 3.*hosts a, b"),
        (lambda: constrained(pinned=(("s", (-1,)),)), "'s' to -1"),
        (lambda: constrained(pinned=(("s", ("c",)),)), "'s' to 'c'.*hosts a, b"),
        (lambda: constrained(pinned=(("s", ()),)), "empty list for 's'.*one or more"),
        (lambda: constrained(pinned=(("s", "a"),)), "pinned of table 's' is 'a'.*a list of whole numbers"),
        (lambda: constrained(pinned=(("s", (0.5,)),)), r"pinned of table 's'\[0\] is 0.5"),
        (lambda: constrained(pinned=(("s", (True,)),)), r"pinned of table 's'\[0\] is True"),
        (lambda: constrained(pinned=(("s", (0,)), ("s", (1,)))), "pinned has table 's' twice"),
        (lambda: constrained(together=(("s", "x"),)), r"'p'.*keeps together \['x'\]"),
        (lambda: constrained(together=((),)), "empty list for 'together'.*one or more"),
        (lambda: constrained(together=("st",)), "constraints.together is 'st'.*a list of texts"),
        (lambda: constrained(together=(("s", "t"), ("t", "u"))), "together has table 't' twice"),
        (lambda: constrained(together=(("s", "s"),)), "together has table 's' twice"),
        (
            lambda: constrained(
                pinned=(("s", (0, 2)), ("t", ("b", 1)), ("u", ("a",))), together=(("s", "t", "u"),)
            ),
            r"\['s', 't', 'u'\] together.*'s' to \[0, 2\].*'t' to \['b', 1\].*a device in common",
        ),
        (lambda: constrained(kinds=(("x", ("row",)),)), r"'p'.*kinds of \['x'\]"),
        (lambda: constrained(kinds=(("s", "row"),)), r"kinds of table 's' is 'row'.*\[\"row\", \"column\"\]"),
        (lambda: constrained(kinds=(("s", ()),)), "empty list for 's'.*one or more"),
        (lambda: constrained(kinds=(("s", ("row",)), ("s", ("column",)))), "kinds has table 's' twice"),
        (lambda: constrained(min_widths=(("x", 4),)), r"'p'.*min_widths of \['x'\]"),
        (lambda: constrained(min_widths=(("s", 0),)), "min_widths 0.*'s'.*1 to 65536"),
        (lambda: constrained(min_widths=(("s", 4), ("s", 8))), "min_widths has table 's' twice"),
    ],
)
def test_what_does_not_go_together_is_refused(make, said):
    with pytest.raises(ShardCoreError, match=said):
        make()


def test_values_at_their_limits_are_taken():
    small = Table("t", 1, 4, 0.0, Reuse((0.0,) * 17, 1))
    assert (small.bytes, Table("u", 3, 8, 1, precision="fp16").bytes) == (16, 48)
    assert Zipf(0).alpha == 0.0 and Reuse((0.9995, *(0.0,) * 16), 1).batch == 1
    assert Problem("p", (small,), Topology((Device(1),)), 1).local_batch == 1
    links = make_links(0.0, within_host=1e9, between_hosts=1e-3)
    assert Topology((Device(1, 0.001),), links=links).slowest_link.latency_ms == 0
    assert ManagedCollision(32).lookup_bytes == 0
    shares = RowShares((0.25, 0.75), (0.5, 0.5))
    assert table(ordered=True, row_shares=shares).row_shares == shares


def test_what_is_not_said_has_its_default():
    assert (T.access, T.precision, T.ordered) == (Zipf(1.05), "fp32", False)
    assert (problem_of().optimizer, problem_of().constraints) == ("exact_sgd", Constraints(0, (), (), ()))
    assert (setting().precision, setting().optimizer) == ("fp32", "exact_sgd")
    assert (Device(1).speed, Device(1).host) == (1.0, "host-0")
    assert (HOSTS.links, HOSTS.hardware, HOSTS.link("within_host")) == ((), None, Link("within_host"))
    assert HOSTS.hosts == ("a", "b") and len(HOSTS) == 4


def test_nouns_are_values_that_nobody_changes():
    nouns = [
        x
        for module in (types, topology, constraints, measurements, lower)
        for x in vars(module).values()
        if dataclasses.is_dataclass(x) and x.__module__ == module.__name__
    ]
    assert len(nouns) > 15 and all(x.__dataclass_params__.frozen for x in nouns)
    by_array = {x.__name__ for x in nouns if not x.__dataclass_params__.eq}
    assert by_array == {"Workload"}  # whose arrays have no one answer to ==
    pinned = Constraints(0, ["s"], [["s", [0]]], [["t"]])
    listed = Problem("p", list(FOUR), Topology(list(HOSTS.devices)), 4, constraints=pinned)
    hash(listed)
    assert listed.constraints == Constraints(0, ("s",), (("s", (0,)),), (("t",),)) and listed.tables == FOUR
    placement = Placement("data_parallel", Shard.whole(FOUR[0]), np.array([1, 0]))
    assert placement.devices == (1, 0) and {*map(type, placement.devices)} == {int}


def test_tables_that_differ_in_anything_differ_as_keys():
    table = Table("t", 10, 8, 1.0)
    others = [
        dataclasses.replace(table, **change)
        for change in (
            {"name": "u"},
            {"rows": 11},
            {"dim": 4},
            {"pooling": 2.0},
            {"access": Zipf(0)},
            {"precision": "fp16"},
            {"dedup": 2.0},
            {"collection": "users"},
            {"ordered": True},
            {"features": 2},
            {"weighted": True},
        )
    ]
    assert len({hash(t) for t in (table, *others)}) == len({table, *others, Table("t", 10, 8, 1)}) == 12


def test_a_shard_knows_its_shape():
    shard = Shard(Table("t", 10, 16, 1.0, precision="fp16"), 2, 10, 4, 16)
    assert (shard.rows, shard.width, shard.bytes, shard.has_all_rows, shard.label) == (
        8,
        12,
        192,
        False,
        "t[2:10, 4:16]",
    )
    assert Shard(shard.table, 0, 10, 4, 8).has_all_rows and Shard.whole(shard.table).label == "t[0:10, 0:16]"


def test_a_step_is_as_long_as_that_of_the_device_that_takes_longest():
    parts = (1.0, 2.0), (3.0, 5.0), (0.5, 0.25), (0.125, 4.0), (7.0, 0.0)
    cost = StepCost(*parts)
    assert cost.compute_ms == (4.0, 7.0) and cost.device_ms == (11.625, 11.25) and cost.total_ms == 11.625


def test_a_problem_of_another_setting_is_refused_by_name_and_both_values(problem):
    problem.require_setting(Setting("anything", 256))  # a topology without hardware takes the model's
    named = dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, hardware="h"))
    named.require_setting(Setting("h", 256))
    for other in (
        Setting("i", 256),
        Setting("h", 128),
        Setting("h", 256, "fp16"),
        Setting("h", 256, "bf16"),
        Setting("h", 256, "fp32", "rowwise_adagrad"),
        Setting("h", 256, "fp32", "adam"),
    ):
        with pytest.raises(SettingMismatch):
            named.require_setting(other)
    with pytest.raises(SettingMismatch) as error:
        problem.require_setting(Setting("nvidia-h200", 65536, optimizer="adam"))
    assert str(error.value).startswith(
        f"problem {problem.name!r} has another setting than the cost model: batch: 256 against 65536, optimizer: "
        "exact_sgd against adam; give a model of the problem's setting by --model"
    )


def test_a_table_stays_a_key_across_processes(tables):
    """Its hash, of strings, is another in each process; so it is not taken along."""
    for table in tables:
        hash(table)
        taken = pickle.loads(pickle.dumps(table))
        assert (
            "_hash" in vars(table)
            and "_hash" not in vars(taken)
            and taken == table
            and hash(taken) == hash(table)
        )


def test_ids_hide_behind_the_dense_part_in_torchrecs_pipeline_only():
    assert Job().id_overlap_ms == Job().dense_ms == 0
    dense = {"dense_forward_ms": 2.0, "dense_backward_ms": 3.0}
    assert Job(**dense).id_overlap_ms == Job(**dense).dense_ms == 5
    assert Job(dense_mflops=32.0).dense_ms == 0  # until a model knows their ms
    alone = Job("none", **dense)
    assert (alone.id_overlap_ms, alone.dense_ms) == (0, 5)
    assert {name for name in PIPELINES if Job(name, **dense).id_overlap_ms} == set(PIPELINES) - {"none"}


@pytest.mark.parametrize("name", ["dense_bytes", "activation_bytes", "update_bytes", "input_bytes"])
def test_bytes_of_the_dense_part_are_whole_and_not_negative(name):
    with pytest.raises(ShardCoreError, match=f"job has {name} -1; it needs"):
        Job(**{name: -1})
    with pytest.raises(ShardCoreError, match=f"job: {name} is 'x'"):
        Job(**{name: "x"})


def test_whole_numbers_of_a_file_are_ms_like_others():
    job = Job(dense_forward_ms=1, dense_backward_ms=2)
    assert (job, type(job.dense_ms)) == (Job(dense_forward_ms=1.0, dense_backward_ms=2.0), float)


def test_kernels_tell_tiers_apart():
    kernels = [kernel for row in TIERS.values() for kernel in (row.kernel, row.cached_kernel) if kernel]
    assert len(set(kernels)) == len(kernels) and TIERS[DEVICE].kernel and not TIERS[DEVICE].cached_kernel
    assert all(TIERS[tier].cached_kernel for tier in BELOW)


@pytest.mark.parametrize("tier", BELOW)
def test_rows_are_all_in_one_tier_and_some_in_a_cache(tier):
    table = Table("t", 100, 8, 1.0, load_factor=0.2, tier=tier)
    assert table.kernel == TIERS[tier].cached_kernel
    assert Table("t", 100, 8, 1.0, tier=tier).kernel == TIERS[DEVICE].kernel
    if TIERS[tier].kernel:
        uncached = Table("t", 100, 8, 1.0, load_factor=0.0, tier=tier)
        assert uncached.kernel == TIERS[tier].kernel
    else:
        with pytest.raises(ShardCoreError, match=f"tier {tier!r}; TorchRec runs it there with a cache"):
            Table("t", 100, 8, 1.0, load_factor=0.0, tier=tier)
    with pytest.raises(ShardCoreError, match=f"table 't' in .* memory of tier {tier!r}"):
        Problem("p", (table,), Topology((Device(GIB),)), 64)
    given = Topology((Device(GIB),) * 2, memory=(Memory(tier, GIB, 2.0),))
    assert given.memory_of(tier).gbps == 2 and given.restricted_to((0,)).memory_of(tier).bytes == GIB // 2
    assert Problem("p", (table,), given, 64, "rowwise_adagrad")


@pytest.mark.parametrize(
    "changes, optimizer, reason",
    [
        (
            {"load_factor": 0.25},
            "rowwise_adagrad",
            "load_factor 0.25 and tier 'ssd'; .* at most 20% of its rows",
        ),
        (
            {},
            "exact_sgd",
            "table 't' in SSD, and TorchRec's key_value has no optimizer 'exact_sgd', only rowwise",
        ),
        ({}, "adam", "no optimizer 'adam'"),
        ({"precision": "bf16"}, "rowwise_adagrad", "key_value has no weights 'bf16', only fp32, fp16"),
    ],
)
def test_ssd_has_what_its_kernel_runs(changes, optimizer, reason):
    given = Topology((Device(GIB),) * 2, memory=(Memory("ssd", GIB, 2.0),))
    with pytest.raises(ShardCoreError, match=reason):
        table = Table("t", 100, 8, 1.0, **{"load_factor": 0.1, "tier": "ssd"} | changes)
        Problem("p", (table,), given, 64, optimizer)


@pytest.mark.parametrize("form, eviction", [(f, e) for f, row in HASH_FORMS.items() for e in row.row_bytes])
def test_a_form_of_hash_table_gives_the_bytes_of_a_row(form, eviction):
    known = HASH_FORMS[form]
    made = ManagedCollision(form=form, eviction=eviction)
    assert made.row_bytes == known.row_bytes[eviction]
    assert ManagedCollision(5, form=form, eviction=eviction).row_bytes == 5
    # Its rows are in device memory, unless they never are.
    share = 0.1 if known.tiers else 1.0
    table = Table("t", 256, 8, 1.0, load_factor=share, managed_collision=made)
    if known.tiers is not None:
        with pytest.raises(ShardCoreError, match="'t' has load_factor .* rows of its hash table are in"):
            replace(table, load_factor=1.1 - share)
    if known.tiers:
        assert table.kernel == "dram_virtual_table"
        for outside in (0.0, 1.0):
            with pytest.raises(ShardCoreError, match="needs that tier, and load_factor above 0, below 1"):
                replace(table, load_factor=outside)
        with pytest.raises(ShardCoreError, match="tier 'ssd'; rows of its hash table are in host memory"):
            replace(table, tier="ssd")


@pytest.mark.parametrize(
    "make, reason",
    [
        (
            lambda: ManagedCollision(),
            "row_bytes None, form '' and eviction ''; it needs row_bytes, or a form",
        ),
        (lambda: ManagedCollision(8, eviction="lru"), "form '' and eviction 'lru'"),
        (
            lambda: ManagedCollision(form="mpzch", eviction="lfu"),
            "form mpzch has eviction 'lfu'; known are none",
        ),
        (lambda: ManagedCollision(form="dynamicemb", eviction="no_eviction"), "known are timestamp, step"),
        (lambda: hashed("kv_zch", "none", 90, buckets=9), "of 9 buckets, which 2 devices .* such as 10"),
        (lambda: hashed("dynamicemb", "lfu", 1000), "1000 rows, .* whole buckets of 128; .* such as 1024"),
    ],
)
def test_hash_tables_that_cannot_be_are_named(make, reason):
    with pytest.raises(ShardCoreError, match=reason):
        make()


def hashed(form: str, eviction: str, rows: int, **fields) -> Problem:
    """A problem of one hash table on two devices."""
    collision = ManagedCollision(form=form, eviction=eviction, **fields)
    share = 0.1 if HASH_FORMS[form].tiers else 1.0
    table = Table("t", rows, 8, 1.0, load_factor=share, managed_collision=collision)
    topology = Topology((Device(GIB),) * 2, memory=(Memory("host", GIB, 2.0),))
    return Problem("p", (table,), topology, 64, "rowwise_adagrad")


def test_some_devices_share_links_with_the_others():
    links = make_links(shared=True, within_host=10.0, between_hosts=4.0)
    whole = Topology(tuple(Device(d + 1, host="aabb"[d]) for d in range(4)), links=links)
    assert whole.restricted_to((0, 1)) == Topology(whole.devices[:2], links=links)
    assert whole.restricted_to((0, 2)).devices == (whole.devices[0], whole.devices[2])
    assert whole.restricted_to((0, 2)).links == (links[0], Link("between_hosts", 2.0, shared=True))
    assert whole.restricted_to((0, 1, 2)).link("between_hosts").gbps == 2
    assert HOSTS.restricted_to((0,)) == Topology(HOSTS.devices[:1])


def test_links_are_those_of_the_outermost_level_that_joins_devices():
    links = make_links(within_host=10.0, between_hosts=4.0)
    whole = Topology(HOSTS.devices, links=links)
    assert whole.slowest_link == links[1] and whole.restricted_to((0, 1)).slowest_link == links[0]
    assert (
        whole.outermost_link(whole.domain_numbers[:, [0, 1]])
        == whole.outermost_link(whole.domain_numbers[:, [2]])
        == links[0]
    )
    assert "within_host 10 GB/s, between_hosts 4 GB/s" in repr(whole)


def test_pins_and_groups_say_where_tables_may_live_and_which_stay_whole():
    problem = constrained(
        unsplit=("v",),
        pinned=(("s", (3, 0, "a")), ("u", ("b", 0)), ("v", ("a", "b"))),
        together=(("s", "t"),),
    )
    assert [problem.allowed_devices(name) for name in "stuv"] == [
        (0, 1, 3),
        (0, 1, 3),
        (0, 2, 3),
        (0, 1, 2, 3),
    ]
    assert set(problem.pinned_devices) == {"s", "t", "u"} and problem.uncut_tables == {"s", "t", "v"}
    assert dict(problem.group_by_table) == {"s": ("s", "t"), "t": ("s", "t")}
    on_one = constrained(pinned=(("s", (0, 2)), ("t", ("b",)), ("u", (1,))), together=(("t", "s"),))
    assert on_one.allowed_devices("s") == on_one.allowed_devices("t") == (2,)
    assert on_one.uncut_tables == {"s", "t", "u"}  # what has a single device gains nothing from a cut
    assert [on_one.constraint_against_cuts(n) for n in "su"] == ["constraints.together", "constraints.pinned"]
    assert problem.constraint_against_cuts("v") == "constraints.unsplit"


def test_kinds_and_widths_say_what_may_run_a_table():
    tables = Table("narrow", 10, 96, 1.0), Table("wide", 10, 4096, 1.0), Table("free", 10, 8, 1.0)
    problem = Problem(
        "p",
        tables,
        HOSTS,
        4,
        constraints=Constraints(
            kinds=(("narrow", ("row", "column")),), min_widths=(("narrow", 20), ("wide", 100), ("free", 64))
        ),
    )
    may = {
        t.name: {
            kind for kind, sharding_kind in SHARDING_KINDS.items() if problem.can_run_table(sharding_kind, t)
        }
        for t in tables
    }
    assert may == {"narrow": {"row", "column"}, "wide": {"column"}, "free": set(SHARDING_KINDS)}
    assert [problem.column_block_width(t) for t in tables] == [24, 128, 8]
    assert [problem.max_shard_width(t) for t in tables] == [96, 2048, 8]
    on_cpu = replace(problem, topology=replace(HOSTS, hardware="cpu-amd-epyc"))
    assert (
        on_cpu.can_run_table(SHARDING_KINDS["row"], tables[1]) and on_cpu.max_shard_width(tables[1]) == 4096
    )


def test_ten_thousand_tables_on_a_thousand_devices_are_pinned():
    tables = tuple(Table(f"t{i}", 10, 8, 1.0) for i in range(10_000))
    topology = Topology(tuple(Device(1, host=f"h{d // 8}") for d in range(1024)))
    pinned = tuple((f"t{i}", (f"h{i % 128}", i % 1024)) for i in range(10_000))
    problem = Problem("p", tables, topology, 1024, constraints=Constraints(pinned=pinned))
    assert sum(len(problem.allowed_devices(t.name)) for t in tables) == sum(
        # a host's eight, and one that may be among them
        8 + (i % 1024 // 8 != i % 128)
        for i in range(10_000)
    )


@pytest.mark.timeout(30)
def test_a_host_may_be_named_a_thousand_times():
    tables = tuple(Table(f"t{i}", 10, 4, 1.0) for i in range(4))
    topology = Topology((Device(1 << 40, host="big"),) * (1 << 16))
    pins = tuple((t.name, ("big",) * 8_000 + (i,)) for i, t in enumerate(tables))
    problem = Problem("p", tables, topology, len(topology), constraints=Constraints(pinned=pins))
    assert len(problem.allowed_devices("t0")) == 1 << 16


def test_pins_that_mean_millions_of_devices_are_refused():
    tables = tuple(Table(f"t{i}", 10, 4, 1.0) for i in range(200))
    devices = (*(Device(1 << 40, 1.0, "big"),) * 30_000, *(Device(1 << 40, 1.0, f"h{i}") for i in range(200)))
    pins = tuple((f"t{i}", ("big", f"h{i}")) for i in range(200))
    with pytest.raises(ShardCoreError, match="pins tables to sets of more than"):
        Problem("p", tables, Topology(devices), len(devices), constraints=Constraints(pinned=pins))


def test_all_wrong_fields_of_a_record_are_named_at_once():
    message = refused(Table, name="t", rows=0, dim=30, pooling=1.0, precision="fp9", dedup=0.5)
    for words in ("rows 0", "dim 30; FBGEMM needs a multiple of 4", "precision 'fp9'", "dedup 0.5"):
        assert words in message
    message = refused(Job, pipeline="semi", id_bytes=3, tower_ratio=0.5)
    assert all(words in message for words in ("job has pipeline 'semi'", "tower_ratio 0.5", "id_bytes 3"))
