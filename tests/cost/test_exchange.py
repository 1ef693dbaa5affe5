"""The communication model is recovered from exchanges, and goes beyond the ranks that were measured."""

import dataclasses

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, exchange_law, linear_law

from shardcore.cost import accuracy, fit
from shardcore.types import Device, Topology
from shardcore.workload import Traffic

QUICK = fit.FitConfig(epochs=3)


def test_exchanges_of_two_ranks_alone_fit_too():
    comm = comm_samples(60, ranks=(2,))
    model = fit.train(compute_samples(linear_law, 60), comm, SETTING, QUICK).model
    assert accuracy.evaluate(model, [], comm)["forward_comm_mape"] < 0.5
    assert (model.weights["exchange_forward"] >= 0).all()


def test_only_exchanges_that_the_model_prices_count():
    compute, comm = compute_samples(linear_law, 60), comm_samples(60, ranks=(2,))
    slow = [dataclasses.replace(s, id=f"other-{i}", request=dataclasses.replace(s.request, **change),
                                backward=tuple(dataclasses.replace(x, median_ms=99.0) for x in s.backward))
            for change in ({"collective": "reduce_scatter"}, {"payload": "bf16"}, {"hosts": 2}) for i, s in enumerate(comm)]
    none = tuple(dataclasses.replace(x, median_ms=0.0) for x in comm[0].forward)
    early = dataclasses.replace(comm[0], id="early", forward=none)
    model, other = (fit.train(compute, c, SETTING, QUICK).model for c in (comm, [*comm, *slow, early]))
    assert all(np.array_equal(model.weights[k], other.weights[k]) for k in model.weights)
    assert accuracy.evaluate(model, [], [*comm, *slow, early]) == accuracy.evaluate(model, [], comm)
    assert (fit.train(compute, slow, SETTING, QUICK).model.weights["exchange_forward"] == 0).all()


def test_exchange_law_beyond_the_ranks_trained_on(model):
    widths = [64, 0, 256, 128, 32, 640, 8, 100]
    cost = model.comm(Traffic.of_columns(np.array(widths) * 256 * 4.0), np.zeros(8), Topology((Device(1),) * 8))
    forward, backward = exchange_law(widths, 256)
    assert cost.forward_ms == pytest.approx(forward, rel=0.01)
    assert cost.backward_ms == pytest.approx(backward, rel=0.01)
