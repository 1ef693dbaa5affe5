"""Catalog of optimizers and weight precisions that FBGEMM fuses into one op, and of dense optimizers of replicas.

TorchRec takes FBGEMM's optimizers by the same names. Which of all these run depends on the device and on
FBGEMM's version; `measure.fused_op` finds out by running one row.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE_BYTES = 4
"""Bytes of one number of optimizer state: FBGEMM keeps FP32 whatever the weights are."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of embedding tables.

    theirs: name in FBGEMM's EmbOptimType. For a dense one, the path of its class.
    states: granularity of each moment: "row" or "cell". FBGEMM's momentum1 is the first, momentum2 the second.
    dense: a name of DENSE_OPTIMIZERS, the one that is most like it. None: it is one itself.
    scratch: number of temporary tensors, each as large as a table's weights, by which a dense one updates a table.
    """

    theirs: str
    states: tuple[str, ...] = ()
    dense: str | None = None
    scratch: int = 0

    def state_bytes(self, per: str, each: int = STATE_BYTES) -> int:
        """Bytes of optimizer state for each row, or for each weight, of a table.

        per: "row" or "cell" (a single weight).

        each: bytes of a number.
        """
        return each * self.states.count(per)


@dataclass(frozen=True)
class Precision:
    """A data type of embedding weights.

    theirs: name in FBGEMM's SparseType and in TorchRec's DataType.
    torch: name of torch's dtype.
    bytes: bytes of one weight.
    """

    theirs: str
    torch: str
    bytes: int


OPTIMIZERS = {
    "exact_sgd": Optimizer("EXACT_SGD", dense="sgd"),
    "rowwise_adagrad": Optimizer("EXACT_ROWWISE_ADAGRAD", ("row",), dense="rowwise_adagrad"),
    "exact_adagrad": Optimizer("EXACT_ADAGRAD", ("cell",), dense="adagrad"),
    "adam": Optimizer("ADAM", ("cell", "cell"), dense="adam"),
    "partial_rowwise_adam": Optimizer("PARTIAL_ROWWISE_ADAM", ("cell", "row"), dense="adam"),
    # Torch has no LAMB, and TorchRec's is a placeholder. Like it, Adam keeps two full moments.
    "lamb": Optimizer("LAMB", ("cell", "cell"), dense="adam"),
}
"""Optimizers that run in the backward op."""
DENSE_OPTIMIZERS = {
    "sgd": Optimizer("torch.optim.SGD"),
    "adagrad": Optimizer("torch.optim.Adagrad", ("cell",), scratch=1),
    "rowwise_adagrad": Optimizer("torchrec.optim.RowWiseAdagrad", ("row",), scratch=1),
    "adam": Optimizer("torch.optim.Adam", ("cell", "cell"), scratch=2),
}
"""Optimizers of replicas. They step over all weights after backward. State has the data type of the weights."""
PRECISIONS = {
    "fp32": Precision("FP32", "float32", 4),
    "fp16": Precision("FP16", "float16", 2),
    "bf16": Precision("BF16", "bfloat16", 2),
}


def shardcore_name(theirs: str, known: dict[str, Optimizer] | dict[str, Precision]) -> str | None:
    """ShardCore's name of an optimizer or data type that FBGEMM and TorchRec call `theirs`; None if there is none."""
    return next((ours for ours, entry in known.items() if entry.theirs == theirs), None)
