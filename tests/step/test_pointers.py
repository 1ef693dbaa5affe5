"""Records by pointer: what compiled code reads is what Python packed, and numba has what that needs."""

import importlib
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba import boolean, float64, int16, int64

INTERNALS = (
    *(f"numba.extending.{x}" for x in ("infer_getattr", "intrinsic", "lower_getattr_generic", "models")),
    "numba.extending.register_model",
    "numba.core.typing.templates.AttributeTemplate",
    "numba.np.arrayobj.populate_array",
)
"""Names of numba that step/engine/pointers.py uses. All but the first five are internal: any release may drop them."""


class Some(NamedTuple):
    """Fields of each type that records have."""

    grid: float64[:, ::1]
    scale: float64
    is_on: boolean
    small: int16[::1]
    is_off: boolean
    marks: boolean[:, :, ::1]
    n: int64
    empty: float64[:, ::1]


@pytest.mark.parametrize("name", INTERNALS)
def test_numba_has_what_records_by_pointer_are_made_of(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute), (
        f"numba {numba.__version__} has no {name}, by which step/engine/pointers.py passes records to compiled code"
    )


def test_compiled_code_reads_each_field_as_it_was_packed():
    from shardcore.step.engine.pointers import WORDS, Record, entry, make_record_loader

    record_at = make_record_loader(Record(Some))

    @entry(float64(WORDS, float64[::1]))
    def read(words, into):
        record = record_at(words)
        into[0], into[1], into[2] = record.grid[1, 2], record.scale, 1.0 if record.is_on else 0.0
        into[3], into[4], into[5] = (
            float(record.small[-1]),
            1.0 if record.is_off else 0.0,
            1.0 if record.marks[1, 0, 2] else 0.0,
        )
        into[6], into[7], into[8] = float(record.n), float(len(record.empty)), float(record.grid.shape[1])
        record.grid[0, 0] = 7.0
        return record.grid.sum()

    grid, marks = np.arange(6.0).reshape(2, 3), np.zeros((2, 2, 3), bool)
    marks[1, 0, 2] = True
    record = Some(grid, -0.5, True, np.array([3, -4], np.int16), False, marks, -(2**40), np.zeros((0, 5)))
    into = np.zeros(9)
    assert read(record, into) == 7.0 + sum(range(6))
    assert into.tolist() == [5.0, -0.5, 1.0, -4.0, 0.0, 1.0, -(2.0**40), 0.0, 3.0]
    assert grid[0, 0] == 7.0
    with pytest.raises(TypeError, match="grid is 2-d float32; it needs to be"):
        read(record._replace(grid=grid.astype(np.float32)), into)
    with pytest.raises(TypeError, match="grid is 2-d float64"):
        read(record._replace(grid=np.zeros((3, 2)).T), into)
