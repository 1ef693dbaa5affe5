"""Access statistics of a table: the rows that its lookups hit.

Reuse or Zipf: how often rows are hit. RowShares: where they lie. ManagedCollision: the map from ids to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from shardcore.core.tiers import BELOW, MemoryTier
from shardcore.core.validation import (
    MOST_BATCH,
    Record,
    number_within,
    one_of,
    require,
    short_repr,
)

MOST_COLLISION_BYTES = 1 << 20
"""Most bytes that managed collision keeps for a row or a lookup."""
MOST_BUCKETS = 1 << 20
"""Buckets of a hash table, at most."""
MOST_RANGES = 1 << 12
"""Ranges of a RowShares, at most."""
REUSE_BINS = 17
"""Bins of a reuse histogram: bin k holds unique rows seen (2^(k-1), 2^k] times, bin 0 once, bin 16 more than
2^15 times."""


def _are_fractions_of_one(values: tuple[float, ...]) -> bool:
    return all(0 <= value <= 1 + 1e-6 for value in values) and abs(sum(values) - 1) < 1e-3


@dataclass(frozen=True)
class Reuse(Record, noun="reuse histogram"):
    """Access statistics as a reuse histogram, as in the dlrm_datasets release and NeuroShard.

    bins: [REUSE_BINS] fractions of a batch's unique rows, by how often each is seen. They sum to 1, or are
        all 0 for a table that is never accessed.
    batch: samples of the batch that was counted. The bins mean nothing without it.
    """

    bins: tuple[float, ...] = field(repr=False)
    batch: Annotated[int, number_within(1, MOST_BATCH)]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.bins) == REUSE_BINS and (not any(self.bins) or _are_fractions_of_one(self.bins)),
            f"reuse histogram has {len(self.bins)} bins {short_repr(self.bins)} that sum to {sum(self.bins):.6g}; "
            f"it needs {REUSE_BINS} fractions that sum to 1 (or are all 0)",
        )


@dataclass(frozen=True)
class Zipf(Record, noun="zipf"):
    """Access statistics as a power law: the row of rank r (from 1) is accessed in proportion to r^-alpha.

    alpha: within 0 and 10; 0 is uniform.
    """

    alpha: Annotated[float, number_within(0, 10, below=True)]


@dataclass(frozen=True)
class RowShares(Record, noun="row shares"):
    """Access statistics by row range: shares of a batch in each of N equal ranges of a table's rows, in order.

    lookups: [N] shares of the lookups.
    unique: [N] shares of the unique rows.
    """

    lookups: tuple[float, ...]
    unique: tuple[float, ...]

    def __repr__(self) -> str:
        return f"RowShares({len(self.lookups)} ranges)"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lookups", "unique"):
            shares = getattr(self, name)
            require(
                _are_fractions_of_one(shares) and len(shares) <= MOST_RANGES,
                f"row shares have {len(shares)} {name} that sum to {sum(shares):.6g}; they need to be fractions that "
                f"sum to 1, one for each range of rows, 1 to {MOST_RANGES}",
            )
        require(
            len(self.lookups) == len(self.unique),
            f"row shares have {len(self.lookups)} lookups and {len(self.unique)} unique; they need as many of each",
        )


ROUTINGS = ("contiguous", "round_robin", "hashed")
"""Rules by which raw ids go to buckets of rows (tables/hash_tables.py).

contiguous: equal ranges of ids. TorchRec's, where the module knows their size (input_hash_size).
round_robin: by the remainder. TorchRec's MPZCH without that size.
hashed: ids are hashed before.
"""


@dataclass(frozen=True)
class HashForm:
    """Implementation of a hash table for embeddings, with its memory per row.

    row_bytes: device memory for each row, by eviction policy: its raw id, and what eviction needs.
    slot_rows, slot_bytes: rows that a device has in whole groups of so many, and device memory for each
        group.
    tiers: tiers below device memory where all rows of such a table are, as its kernel has them. {}: they are
        in device memory. None: as those of any table.
    """

    row_bytes: Mapping[str, int]
    slot_rows: int = 1
    slot_bytes: int = 0
    tiers: Mapping[str, MemoryTier] | None = None


_NO_FORM = HashForm({})
HASH_FORMS: Mapping[str, HashForm] = {
    # TorchRec's MCHManagedCollisionModule: sorted raw ids, rows, and counts or times of 8 bytes each.
    "managed_collision": HashForm({"lfu": 24, "lru": 24, "distancelfu": 32}),
    # TorchRec's HashZchManagedCollisionModule (MPZCH): an id of 8 bytes, and an hour of 4 where it evicts.
    "mpzch": HashForm({"none": 8, "single_ttl": 12, "per_feature_ttl": 12, "lru": 12}),
    # TorchRec's dram_virtual_table (KV-ZCH), whose rows FBGEMM keeps in blocks of host memory. A header has
    # the id, a time, a count and a flag (init_metaheader_config in embedding_configs.py; pytorch/FBGEMM
    # 4187).
    "kv_zch": HashForm(
        dict.fromkeys(("none", "count", "timestamp", "count_timestamp", "feature_score", "l2_norm"), 0),
        tiers={
            BELOW[0]: MemoryTier(
                BELOW[0],
                "host memory",
                "",
                "dram_virtual_table",
                shares_cache=False,
                holds_state=True,
                header_bytes=16,
                is_synced=False,
                optimizers=("rowwise_adagrad", "partial_rowwise_adam", "adam"),
                precisions=("fp32", "fp16"),
            )
        },
    ),
    # NVIDIA's dynamicemb (recsys-examples): id, digest and one or two scores of each row, and a size of each
    # of its own buckets of 128 rows (scored_hashtable.py). A table that never evicts doubles, so it has no
    # size to plan with.
    "dynamicemb": HashForm(
        {"timestamp": 17, "step": 17, "customized": 17, "lfu": 17, "timestamp_lfu": 25},
        slot_rows=128,
        slot_bytes=4,
        tiers={},
    ),
}
"""Forms of hash tables, by name. Eviction counts as bytes alone: tables count as full, and evicted rows are
not priced. To add a form, add a row."""


@dataclass(frozen=True)
class ManagedCollision(Record, noun="managed collision"):
    """A hash table that maps raw ids to rows, and its device memory.

    row_bytes: for each row: the raw id, and for some the row that it has, and when it was seen. None: its
        form's.
    lookup_bytes: for each lookup of a step: the ids seen since rows were last evicted.
    bytes: on each device, whatever its rows.
    buckets: equal ranges of rows. Devices that divide the rows have to divide them. 1: one for each device.
    routing: a name of ROUTINGS.
    input_size: raw ids are below it. Only for contiguous routing.
    form: a name of HASH_FORMS. "": numbers alone describe it.
    eviction: policy by which ids make room, one of the form's.
    """

    row_bytes: Annotated[int | None, number_within(0, MOST_COLLISION_BYTES)] = None
    lookup_bytes: Annotated[int, number_within(0, MOST_COLLISION_BYTES)] = 0
    bytes: Annotated[int, number_within(0, 1 << 30)] = 0
    buckets: Annotated[int, number_within(1, MOST_BUCKETS)] = 1
    routing: Annotated[str, one_of(ROUTINGS)] = "round_robin"
    input_size: Annotated[int, number_within(0, 1 << 63)] = 0
    form: Annotated[str, one_of(("", *HASH_FORMS))] = ""
    eviction: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form:
            known = HASH_FORMS[self.form].row_bytes
            one_of(known)(self.eviction, f"managed collision of form {self.form}", "eviction")
            if self.row_bytes is None:
                object.__setattr__(self, "row_bytes", known[self.eviction])
        require(
            self.row_bytes is not None and bool(self.form) == bool(self.eviction),
            f"managed collision has row_bytes {self.row_bytes}, form {self.form!r} and eviction {self.eviction!r}; it "
            f"needs row_bytes, or a form ({', '.join(HASH_FORMS)}) and its eviction",
        )
        require(
            self.routing != "contiguous" or self.input_size > 0,
            f"managed collision has routing 'contiguous' and input_size {self.input_size}; it needs the size of "
            "the range of raw ids",
        )

    @property
    def hash_form(self) -> HashForm:
        """Form of the hash table, by its name in HASH_FORMS; an empty form where numbers alone describe the table."""
        return HASH_FORMS.get(self.form, _NO_FORM)
