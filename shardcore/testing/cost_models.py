"""Conformance suite for cost models: what every cost model has to fulfil."""

from __future__ import annotations

import math

import numpy as np

from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.model import CostModel, price
from shardcore.search import SHARDERS
from shardcore.step.exchange_lines import has_concave_exchanges, is_even_division_cheapest, total_linear_cost
from shardcore.step.kinds import CHANNELS, Channel
from shardcore.step.lower import lower
from shardcore.step.scopes import WORLD
from shardcore.testing.problems import problem_with_slack


class CostModelConformance:
    """Promises of a cost model. Subclasses define `model`, and `problem` for one of another batch or hardware.

    A search adds and subtracts encodings, prices many plans at once, and runs the head compiled. So it is
    checked that all of these agree.
    """

    tolerance = 1e-9

    def model(self) -> CostModel:
        raise NotImplementedError

    def problem(self) -> Problem:
        return problem_with_slack(0, 4, 4.0)

    def _model_and_encodings(self) -> tuple[CostModel, np.ndarray]:
        model = self.model().for_problem(self.problem())
        return model, model.encode([Shard.whole(table) for table in self.problem().tables])

    def _model_and_plans(self) -> tuple[CostModel, list[Plan]]:
        problem = self.problem()
        model = self.model().for_problem(problem)
        return model, [SHARDERS["random"](problem, model, seed=seed) for seed in range(3)]

    def test_model_for_a_problem_has_its_batch(self) -> None:
        model = self.model().for_problem(self.problem())
        assert isinstance(model, CostModel)
        assert model.setting.batch == self.problem().global_batch

    def test_encoding_of_a_shard_does_not_depend_on_other_shards(self) -> None:
        model, codes = self._model_and_encodings()
        shards = [Shard.whole(table) for table in self.problem().tables]
        assert codes.shape == (len(shards), codes.shape[1]) and codes.dtype == np.float64
        assert np.isfinite(codes).all()
        apart = np.concatenate([model.encode([shard]) for shard in shards])
        np.testing.assert_allclose(apart, codes, rtol=1e-5)

    def test_op_times_agree_for_one_op_many_ops_and_compiled_code(self) -> None:
        model, codes = self._model_and_encodings()
        sums = np.array([codes[:n].sum(0) for n in range(len(codes) + 1)])
        ms, (head, parameters, fetched) = model.op_ms(sums), model.compiled_op_ms()
        assert ms[0] == 0 and (ms[1:] > 0).all() and np.isfinite(ms).all()
        np.testing.assert_allclose([model.op_ms(s[None])[0] for s in sums], ms, rtol=self.tolerance)
        np.testing.assert_allclose([head(s, parameters) for s in sums[1:]], ms[1:], rtol=self.tolerance)
        chain_ms = model.op_part_ms(sums[1:])[:, 1:].sum(-1)
        np.testing.assert_allclose([head(s, fetched) for s in sums[1:]], chain_ms, rtol=self.tolerance)

    def test_parts_of_an_op_are_times(self) -> None:
        model, codes = self._model_and_encodings()
        assert model.op_part_ms(codes).shape == (len(codes), 3) and (model.op_part_ms(codes) >= 0).all()

    def test_collectives_of_many_plans_and_of_one_agree(self) -> None:
        model, plans = self._model_and_plans()
        problem = self.problem()
        traffic = np.stack([lower(plan, problem).traffic for plan in plans], axis=1)
        compute_ms = np.random.default_rng(0).uniform(1, 2, (len(plans), len(problem.topology)))
        together = model.comm_cost(traffic, compute_ms, problem.topology)
        for i in range(len(plans)):
            alone = model.comm_cost(traffic[:, i], compute_ms[i], problem.topology)
            for name, ms in vars(together).items():
                assert (ms >= 0).all(), name
                np.testing.assert_allclose(ms[i], getattr(alone, name), rtol=self.tolerance, err_msg=name)

    def test_prices_are_finite_and_repeat(self) -> None:
        model, plans = self._model_and_plans()
        for plan in plans:
            workload = lower(plan, self.problem())
            first = price(workload, model)
            assert first == price(workload, model) and 0 < first.total_ms < math.inf
            assert all(isinstance(sentence, str) for sentence in model.out_of_range(workload))

    def test_the_model_for_bounds_never_costs_more(self) -> None:
        model, codes = self._model_and_encodings()
        bounding = model.bounding_model
        if bounding is None:
            return
        sums, slack = np.cumsum(codes, axis=0), 1 + self.tolerance
        assert (bounding.op_ms(sums) <= model.op_ms(sums) * slack).all()
        rates = bounding.rate_lower_bounds(sums[0])
        assert (rates >= 0).all()
        assert (bounding.launch_ms() + sums @ rates <= bounding.op_ms(sums) * slack).all()

    def test_exchanges_are_as_the_model_for_bounds_says(self) -> None:
        """Even exchanges cost at least their linear lower bound, and at most as much as uneven exchanges."""
        model, _ = self._model_and_encodings()
        topology, bounding = self.problem().topology, model.bounding_model
        if bounding is None or not is_even_division_cheapest(bounding, topology):
            return
        n, rng, slack = len(topology), np.random.default_rng(0), 1 + 100 * self.tolerance
        speed = np.array([device.speed for device in topology.devices])

        def bounded_parts_ms(each: np.ndarray, channel: Channel) -> np.ndarray:
            """[2, P] exchange ms: forward of the slowest device, backward as mean over devices. each: [P, D] bytes."""
            traffic = np.array([each * (c == channel) for c in CHANNELS])
            comm = bounding.comm_cost(traffic, np.zeros(each.shape), topology)
            forward = (comm.forward_ms + comm.input_ms).max(-1)
            return np.array([forward, comm.backward_ms @ speed / speed.sum()])

        for channel in (c for c in CHANNELS if c.group == WORLD):
            for n_bytes in 10.0 ** np.arange(2, 10):
                each = n_bytes * np.array([0.1, 0.55, 1.0])
                between = (each[0] if has_concave_exchanges(bounding, topology) else n_bytes, n_bytes)
                *of_byte, once = total_linear_cost(bounding, {channel: 1.0}, topology, between)
                even = bounded_parts_ms(np.outer(each, np.ones(n)), channel)
                assert (once + each * sum(of_byte) <= even.sum(0) * slack).all(), (channel, n_bytes)
                # Replicas are alike on all devices.
                drawn = n_bytes * n * rng.dirichlet(np.ones(n), 8 * (not channel.definition.dense))
                assert (even[:, -1:] <= bounded_parts_ms(drawn, channel) * slack).all(), (channel, n_bytes)
