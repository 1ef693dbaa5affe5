"""Records of arrays that compiled functions take as one pointer.

Numba passes a tuple of 30 arrays as 250 numbers. Each function would unpack them all, and each call pack
them again. That took half of the time to compile. So a record is a pointer to the addresses and shapes of
its arrays, one word each, and a compiled function loads those that it uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model
from numba.np.arrayobj import populate_array

from shardcore.core import jit

WORDS = types.int64[::1]
"""The type of a packed record in a signature."""


@dataclass(frozen=True)
class Array:
    """Annotation of a C-contiguous array in a record.

    dims: a letter or digit for each dimension.
    dtype: numba's type of its entries.
    """

    dims: str
    dtype: Any


@cache
def record_fields(record: type) -> dict[str, Any]:
    """numba types of a record's fields, by name."""
    return {
        name: types.Array(kind.dtype, len(kind.dims), "C") if isinstance(kind, Array) else kind
        for name, kind in record.__annotations__.items()
    }


class Record(types.Type):
    """numba's type of a pointer to a record.

    of: a NamedTuple. Annotations are `Array`, or numba's types: C-contiguous arrays, float64 or boolean.
    """

    def __init__(self, of: type) -> None:
        self.fields = record_fields(of)
        # Number of the first word of each field.
        sizes = [1 + getattr(field, "ndim", 0) for field in self.fields.values()]
        self.at = dict(zip(self.fields, np.cumsum([0, *sizes]).tolist(), strict=False))
        # Numba takes types of one name for the same type.
        super().__init__(name=of.__name__)


register_model(Record)(models.OpaqueModel)


def pack_record(record: Any) -> Any:
    """Pack a record into int64 words for a compiled function. The record has to outlive the call.

    Anything that is not a NamedTuple stays as it is.
    """
    if not isinstance(record, tuple):
        return record
    words: list[int] = []
    for name, kind in record_fields(type(record)).items():
        value = getattr(record, name)
        if not isinstance(kind, types.Array):
            # All words are int64, so a float is stored by its bits.
            words.append(
                int(np.array(value, kind.name).astype(np.float64).view(np.int64))
                if kind is types.float64
                else int(value)
            )
            continue
        # Compiled code trusts these: any other array would be read wrongly.
        if value.dtype != kind.dtype.name or value.ndim != kind.ndim or not value.flags.c_contiguous:
            raise TypeError(f"{name} is {value.ndim}-d {value.dtype}; it needs to be {kind}")
        words += (value.ctypes.data, *value.shape)
    return np.array(words, np.int64)


def pack_records(records: Any) -> np.ndarray:
    """[B, W] packed words of B records. records: one record, whose arrays have a first dimension of B."""
    words = np.tile(pack_record(type(records)(*(array[0] for array in records))), (len(records[0]), 1))
    # Arrays of one record follow those of the one before, so only the addresses differ.
    for name, at in Record(type(records)).at.items():
        array = getattr(records, name)
        words[:, at] += np.arange(len(array)) * array.strides[0]
    return words


def make_record_loader(record: Record) -> Any:
    """Make a function for compiled code that turns packed words into a record."""

    @intrinsic
    def load_record(typing_context, words):  # noqa: ANN001, ANN202 (numba's own form)
        def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
            array = context.make_array(signature.args[0])(context, builder, args[0])
            # The array's data is the record, so its address is the pointer.
            return builder.bitcast(array.data, context.get_value_type(record))

        return record(words), codegen

    return load_record


entry = partial(jit.compile_entry, convert=pack_record)
"""Declare an entry like jit.compile_entry, for functions that take records."""


@infer_getattr
class _FieldTypes(AttributeTemplate):
    key = Record

    def generic_resolve(self, record: Record, name: str) -> types.Type | None:
        return record.fields.get(name)


@lower_getattr_generic(Record)
def _load_field(context, builder, record, pointer, name):  # noqa: ANN001, ANN202 (numba's own form)
    """Compile the access to a field of a packed record."""
    kind, at, word_type = record.fields[name], record.at[name], context.get_value_type(types.int64)
    words = builder.bitcast(pointer, word_type.as_pointer())

    def load_word(i: int) -> Any:
        loaded = builder.load(builder.gep(words, [word_type(at + i)]))
        # Addresses and shapes stay the same during a call. So LLVM may load them once, before a loop.
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if kind is types.boolean:
        return builder.icmp_signed("!=", load_word(0), word_type(0))
    if not isinstance(kind, types.Array):
        # The bits of a float64, read back as one.
        return builder.bitcast(load_word(0), context.get_value_type(kind))
    array = context.make_array(kind)(context, builder)
    shape = [load_word(1 + i) for i in range(kind.ndim)]
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    # In C order entries of the last dimension are neighbours. Each one before strides over all after it.
    strides = [word_type(size)]
    for length in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(load_word(0), context.get_data_type(kind.dtype).as_pointer())
    # Without meminfo numba counts no references: the record owns the memory.
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()
