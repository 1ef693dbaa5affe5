"""Payloads: forms in which outputs and gradients travel. One row of PAYLOADS defines each.

Outputs and gradients are FP32 at both ends. TorchRec's codec encodes them before a collective, and decodes
them after (fbgemm_qcomm_codec.py; sizes by calc_quantized_size in FBGEMM's quantize_comm.py).
A codec with scales takes blocks: some elements that share one. It fails where what a device sends another is
no whole number of blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_DIM, Rule, short_repr

FP32_BYTES = 4
"""Bytes of an element of outputs and gradients at both ends."""


@dataclass(frozen=True)
class Payload:
    """A form (data type or codec) in which outputs and gradients travel.

    bytes: bytes of an element, without scales.
    block: elements that share a scale, multiples of which the codec takes. 1: it has no scales.
    scale_bytes: bytes of a scale.
    chosen: True if a job chooses its block, which its name then ends in: fp8-256.
    pads: True if pooled outputs of a device are padded to whole blocks forward. Gradients never are.
    copies: True if encoding makes an FP32 copy first, clamped or padded.
    cuda_only: True if FBGEMM has no CPU kernel of the codec.
    summed: payloads of collectives that sum, forward and backward, as TorchRec substitutes them. None: the
      same. (): the codec fails there.
    """

    bytes: float
    block: int = 1
    scale_bytes: float = 0.0
    chosen: bool = False
    pads: bool = False
    copies: bool = False
    cuda_only: bool = False
    summed: tuple[str, ...] | None = None

    @property
    def size_ratio(self) -> float:
        """Encoded bytes per byte of FP32, scales included."""
        return (self.bytes + self.scale_bytes / self.block) / FP32_BYTES


PAYLOADS: Mapping[str, Payload] = {
    "fp32": Payload(4),
    "fp16": Payload(2, copies=True),
    "bf16": Payload(2, copies=True),
    # Without a block there are no scales, and each element is cast. TorchRec's fp8_quantize_dim is the block.
    "fp8": Payload(1, chosen=True, cuda_only=True, summed=("fp16", "bf16")),
    # A scale and a bias in FP32. TorchRec gives INT8 no context in a reduce-scatter, and FBGEMM then fails.
    "int8": Payload(1, 32, 8, summed=()),
    # A shared exponent. TorchRec's mx4_quantize_dim is the block.
    "mx4": Payload(0.5, 32, 1, chosen=True, pads=True, copies=True, summed=("fp16", "bf16")),
}
"""By name."""
_SCALE_BYTES = {"fp8": 8}
"""Bytes of a scale that a row has only with a block: FP8 rows have a scale and padding, as FBGEMM's 8 bits have."""
CASTS = tuple(name for name, row in PAYLOADS.items() if row.summed is None and row.size_ratio < 1)
"""Payloads that are plain number types, such as FP16, which torch casts to and collectives sum. They are drawn to be
measured."""
MEASURED = ("fp32", *CASTS)
"""Payloads that collectives are measured with."""
_FORMS = f"{', '.join(PAYLOADS)}, and of scales for N elements fp8-N or mx4-N, N a multiple of 4"


@cache
def payload_by_name(name: str) -> Payload:
    """Payload by name, such as "fp8-256". Raises ShardCoreError for an unknown name."""
    known, _, block = name.partition("-")
    row = PAYLOADS.get(known)
    if row and not block and known == name:
        return row
    if (
        row
        and row.chosen
        and re.fullmatch("[1-9][0-9]{0,5}", block)
        and int(block) <= MOST_DIM
        and not int(block) % 4
    ):
        return replace(row, block=int(block), scale_bytes=_SCALE_BYTES.get(known, row.scale_bytes))
    raise ShardCoreError(f"a payload is {short_repr(name)}; known are {_FORMS}")


def _is_payload_name(name: str) -> bool:
    with suppress(ShardCoreError):
        return bool(payload_by_name(name))
    return False


require_payload = Rule(_is_payload_name, f"known are {_FORMS}")
"""Rule of a payload's name."""


def block_multiple(payload: Payload, elements: int) -> int:
    """Smallest n for which n × elements is a multiple of the codec's block size."""
    return payload.block // math.gcd(elements, payload.block)
