"""The names that FBGEMM and TorchRec have for what they fuse, and the state that FBGEMM keeps."""

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from shardcore.core.catalog import OPTIMIZERS, PRECISIONS, shardcore_name
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Shard, Table
from shardcore.measure import fused_op
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.memory import resident_bytes, table_peak_bytes

WIDTHS = (8, 64)


def state_bytes(optimizer: str, precision: str) -> int:
    """Bytes of the optimizer state of a CUDA op with one row a table, built without its memory."""
    op = fused_op.build_fused_op(WIDTHS, optimizer, precision, "meta")
    return sum(
        state.numel() * state.element_size()
        for n in (1, 2)
        if (state := getattr(op, f"momentum{n}_dev")).is_floating_point()
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_what_fbgemm_allocates(optimizer, precision):
    given = OPTIMIZERS[optimizer]
    assert state_bytes(optimizer, precision) == len(WIDTHS) * given.state_bytes("row") + sum(
        WIDTHS
    ) * given.state_bytes("cell")


def test_fbgemm_builds_no_cuda_op_of_bf16_weights():
    """As docs/measure.md says. Once it does, GPUs may train them."""
    with pytest.raises(AssertionError, match="cache_precision bf16 not supported"):
        fused_op.build_fused_op(WIDTHS, "exact_sgd", "bf16", "meta")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_shard_takes_its_state_too(optimizer):
    """Of a hundred rows it is a hundred times what FBGEMM allocates for one."""

    def extra(width: int) -> int:
        table, one = Table("t", 100, width, 1.0), Topology((Device(1 << 30),))
        given, sgd = (Problem("p", (table,), one, 32, optimizer=name) for name in (optimizer, "exact_sgd"))
        own, plain = (table_peak_bytes(table, problem) for problem in (given, sgd))
        assert resident_bytes(WHOLE_ROWS, Shard.whole(table), given)[1] == own - plain
        return own - plain

    assert sum(map(extra, WIDTHS)) == 100 * state_bytes(optimizer, "fp32")


def test_names_are_those_of_fbgemm_and_of_torchrec():
    data_types = pytest.importorskip("torchrec.modules.embedding_configs").DataType
    assert {o.theirs for o in OPTIMIZERS.values()} <= set(EmbOptimType.__members__)
    for name, precision in PRECISIONS.items():
        assert name == SparseType[precision.theirs].value
        dtype = SparseType[precision.theirs].as_dtype()
        assert (str(dtype), dtype.itemsize) == (f"torch.{precision.torch}", precision.bytes)
        assert precision.theirs in data_types.__members__
    assert shardcore_name("EXACT_ROWWISE_ADAGRAD", OPTIMIZERS) == "rowwise_adagrad"
    assert shardcore_name("BF16", PRECISIONS) == "bf16"
    assert shardcore_name("MADGRAD", OPTIMIZERS) is shardcore_name("INT8", PRECISIONS) is None
