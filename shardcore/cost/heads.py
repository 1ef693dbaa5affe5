"""Heads: ms of an op from the summed encodings of its shards. A cost model has one, or several whose ms add up.

Shapes: F numbers of an encoding, P parameters; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardcore.cost import nets, quantiles


class CompiledHead(NamedTuple):
    """A compiled head: head(sums [F], parameters [P]) -> ms of one op.

    Its numba type is float64(float64[::1], float64[::1]).
    fetched: [P] the parameters with which it gives the op's part of a chain of fetches (model.fetch_wait_ms).
    """

    head: Callable[[np.ndarray, np.ndarray], float]
    parameters: np.ndarray
    fetched: np.ndarray


@dataclass(frozen=True, eq=False)
class LinearHead:
    """An op that takes a launch, whatever it runs, and a rate for each number of its summed encoding.

    terms: [..., 3, 1 + F] ms of a launch, then of a unit of each number: forward, backward, and of the link over which
      caches fetch ahead. Leading dimensions are of many models.
    """

    terms: np.ndarray
    error_quantile = 0.0

    @property
    def encoding_width(self) -> int:
        """Number of entries of an encoding."""
        return self.terms.shape[-1] - 1

    def op_part_ms(self, sums: np.ndarray) -> np.ndarray:
        """[..., 3] ms of ops, forward, backward and on the link, from summed encodings [..., F] (see
        CostModel.op_part_ms).
        """
        # One launch for any number of shards, none for an empty op: min(1, count).
        launch = self.terms[..., None, :, 0] if self.terms.ndim > 2 else self.terms[:, 0]
        return launch * np.minimum(1.0, sums[..., :1]) + sums @ np.swapaxes(self.terms[..., 1:], -1, -2)

    def compiled_op_ms(self) -> CompiledHead:
        """Compiled function that applies the head to the features of one op."""
        from shardcore.cost import compiled  # numba compiles on import

        return CompiledHead(
            compiled.compile_head(compiled.linear_op_ms), self.terms[:2].sum(0), self.terms[1:].sum(0)
        )

    def launch_ms(self) -> float:
        """ms of an op's launch, forward + backward."""
        return float(self.terms[:2, 0].sum())

    def rate_lower_bounds(self, least: np.ndarray) -> np.ndarray:
        """[..., F] ms for a unit of each number of an encoding, whatever the load (see CostModel.rate_lower_bounds)."""
        return np.broadcast_to(self.terms[:2, 1:].sum(0), np.shape(least))

    def at_confidence(self, confidence: float | None) -> LinearHead:
        """The head itself at any confidence: its rates are given, so its times have no spread."""
        return self


@dataclass(frozen=True, eq=False)
class ContendedHead:
    """An op whose shards slow each other, as of `nets.op_ms`.

    weights: of nets.op_ms, and of quantiles.quantile_factors.
    confidence: an op costs the quantile of this level. None: the mean.
    """

    weights: Mapping[str, np.ndarray]
    confidence: float | None = None

    @property
    def encoding_width(self) -> int:
        """Number of entries of an encoding: drivers, then ms forward and backward."""
        return self.weights["load_typical"].size + 2

    @property
    def error_quantile(self) -> float:
        """The quantile of normalised errors at the head's confidence; 0 for the mean. Raises ShardCoreError if it is
        not known.
        """
        return 0.0 if self.confidence is None else quantiles.error_quantile(self.weights, self.confidence)

    def op_part_ms(self, sums: np.ndarray) -> np.ndarray:
        """[..., 3] ms of ops, forward, backward and on the link, from summed encodings [..., F] (see
        CostModel.op_part_ms).
        """
        # None is of the link: rows below device memory are priced by another head (composite.MemoryLinks).
        ms = np.zeros((*sums.shape[:-1], 3))
        ms[..., :2] = nets.op_ms(self.weights, sums)
        if self.confidence is not None:
            ms *= quantiles.quantile_factors(self.weights, ms.sum(-1), self.confidence)[..., None]
        return ms

    def compiled_op_ms(self) -> CompiledHead:
        """Compiled function that applies the head to the features of one op."""
        from shardcore.cost import compiled  # numba compiles on import

        w = self.weights
        # The order of parameters is that of compiled.contended_op_ms.
        # Sizes come first: compiled.contended_op_ms computes offsets from them.
        numbers = [w["contention.0.bias"].size, w["band.log_ms"].size, nets.LOAD_FLOOR, self.error_quantile]
        arrays = (
            w["launch"],
            w["band.log_ms"],
            w["band.width"],
            1 / w["load_typical"],
            w["contention.0.weight"],
            w["contention.0.bias"],
            w["contention.1.weight"],
        )
        parameters, fetched = (
            np.concatenate([[*numbers, forward], *(np.ravel(x) for x in arrays)], dtype=float)
            for forward in (True, False)
        )
        return CompiledHead(compiled.compile_head(compiled.contended_op_ms), parameters, fetched)

    def launch_ms(self) -> float:
        """ms of an op's launch, forward + backward."""
        return float(np.sum(self.weights["launch"]))

    def rate_lower_bounds(self, least: np.ndarray) -> np.ndarray:
        """[..., F] least ms that a unit of each entry of an encoding adds to an op; 0 for entries that are not ms.

        Contention grows with the drivers, so its value at `least` is a lower bound.
        """
        # The last two entries are ms, not drivers.
        drivers = np.asarray(least, dtype=float)[..., :-2]
        return np.concatenate([np.zeros_like(drivers), nets.contention_factors(self.weights, drivers)], -1)

    def at_confidence(self, confidence: float | None) -> ContendedHead:
        """The head at the quantile of another confidence."""
        return replace(self, confidence=confidence)


Head = LinearHead | ContendedHead
