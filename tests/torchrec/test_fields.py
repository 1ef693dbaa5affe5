"""Each field of TorchRec's planning records is honoured, priced or refused by name, on each TorchRec."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import field_checks
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner import Topology as TheirTopology

from shardcore.core.errors import ShardCoreError
from shardcore.torchrec.dmp_collection import to_dmp_collection
from shardcore.torchrec.fields import FIELDS, field_defaults, unpriced_field_lines, unpriced_record_lines


@pytest.mark.parametrize("record, field", field_checks.fields())
def test_a_field_is_treated_as_the_table_says(record, field):
    field_checks.check(record, field)


@dataclasses.dataclass
class NewerConstraints(ParameterConstraints):
    """Constraints of a TorchRec to come."""

    row_shards: int | None = None


class NewerTopology(TheirTopology):
    """A topology of a TorchRec to come."""

    def __init__(self, *args: Any, rack_size: int | None = None, unkept: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rack_size = rack_size


@dataclasses.dataclass
class NewerConfig(EmbeddingBagConfig):
    """A config of a TorchRec to come."""

    shadow_rows: int = 0


def newer_model(**given: Any) -> Any:
    from torch import device, nn

    config = NewerConfig(name="a", num_embeddings=100, embedding_dim=8, feature_names=["f0", "f1"], **given)
    other = NewerConfig(name="b", num_embeddings=100, embedding_dim=8, feature_names=["f2"])
    return nn.ModuleDict({"m": EmbeddingBagCollection(device=device("meta"), tables=[config, other])})


def test_an_unknown_field_is_refused_where_it_is_set():
    field_checks.planned(asked=NewerConstraints())
    with pytest.raises(
        ShardCoreError,
        match="ParameterConstraints of table 'a' has row_shards 3, which this "
        "ShardCore does not know; leave it at its default, None",
    ):
        field_checks.planned(asked=NewerConstraints(row_shards=3))
    field_checks.planned(newer_model())
    with pytest.raises(ShardCoreError, match="config of table 'a' has shadow_rows 7, which this ShardCore"):
        field_checks.planned(newer_model(shadow_rows=7))
    sizes = {"world_size": 2, "compute_device": "cuda"}
    planner = field_checks.planned(on=NewerTopology(**sizes)).planner
    assert "topology may have unkept, which ShardCore does not know and cannot read" in planner.unpriced
    with pytest.raises(ShardCoreError, match="topology has rack_size 4, which this ShardCore does"):
        field_checks.planned(on=NewerTopology(**sizes, rack_size=4))


def test_a_field_at_its_default_is_never_refused():
    """Old code sets defaults by hand."""
    usual = {name: default for name, default in field_defaults(ParameterConstraints).items()}
    assert unpriced_record_lines(ParameterConstraints(**usual), "constraints") == []
    with pytest.raises(ShardCoreError, match="DMPCollection has use_sharded_relay True; replicas are priced"):
        unpriced_field_lines(
            field_checks.records()["DMPCollection"], {"use_sharded_relay": True}, "DMPCollection"
        )


def test_arguments_that_follow_from_a_plan_of_groups_are_refused():
    grouped, problem = field_checks.grouped()
    with pytest.raises(ShardCoreError, match="DMPCollection.s world_size follows from the plan; leave it"):
        to_dmp_collection(grouped, problem, field_checks.model(), world_size=8)


def test_the_table_has_no_field_that_no_version_has():
    """A field that TorchRec took back would never be tried."""
    known = {"use_sharded_relay", "ssd_cap", "ssd_mem_bw", "pod_size", "created_by_factory", "stash_weights"}
    # fused_params are arguments of FBGEMM's op, settings of SSD, and what TorchRec takes out or renames.
    known |= {*FIELDS["KeyValueParams"], "lr", "betas", "use_one_tbe_per_table", "res_enabled_tables"}
    for record, kind in field_checks.records().items():
        assert set(FIELDS[record]) - set(field_defaults(kind)) <= known
