"""Rollouts: what a policy sees, where it may place, and how random plans differ from the best."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuts import MODEL, draw_problem
from policies import untrained

from shardcore.core.access_statistics import Zipf
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.cost.model import price
from shardcore.search import Budget, sharder
from shardcore.search.learned.nets import FEATURES, shard_features
from shardcore.search.learned.policy import NETS
from shardcore.search.learned.rollout import Rollouts
from shardcore.search.learned.training import CostSample, PolicyConfig, PolicyLearner, PreparedProblem
from shardcore.search.lockstep import search_space_by_columns
from shardcore.step import access
from shardcore.step.lower import lower
from shardcore.step.ways import cut_into_equal_parts, placements_of_bundles
from shardcore.tables import streams
from shardcore.testing.plans import check_plan
from shardcore.testing.problems import CASES, small_problem_model

each_net = pytest.mark.parametrize("name", NETS)


def rolled(name, problem, plans=6, random=True):
    """A problem, and plans of it by an untrained policy."""
    setting = replace(MODEL.setting, batch=problem.global_batch)
    policy, prepared = untrained(name), PreparedProblem(problem, replace(MODEL, setting=setting))
    rollouts = Rollouts(policy.net, policy.weights, plans, np.random.default_rng(0) if random else None)
    return prepared, rollouts.roll_out(prepared.space, prepared.keys)


@each_net
def test_costs_are_the_prices_of_the_plans_and_parts_are_theirs(name):
    problem = draw_problem(3, n_tables=7)
    prepared, rollout = rolled(name, problem)
    keys, made = prepared.keys[0][rollout.placed.order[0]], rollout.placed
    for k in range(6):
        bundles = prepared.cache.deal_bundles([tuple(key) for key in keys.tolist()])
        plan = Plan(tuple(placements_of_bundles(bundles, made.devices[0, k], problem)))
        cost = price(lower(plan, problem), prepared.cache.model)
        assert cost.total_ms == pytest.approx(made.total_ms[0, k])
        parts = np.stack([cost.forward_compute_ms, cost.backward_comm_ms, cost.backward_compute_ms], 1)
        assert made.batch.device_part_ms()[0, k] == pytest.approx(parts)


@each_net
def test_only_legal_devices_are_taken_whatever_the_scores(name):
    problem = CASES["together and pinned, tight"]
    _, rollout = rolled(name, problem, plans=40)
    made, fits = rollout.placed, rollout.placed.feasible_plans
    legally = np.take_along_axis(made.legal, made.devices[..., None], -1)[..., 0]
    assert legally[fits].all() and fits.any() and (np.isfinite(made.total_ms) == fits).all()


@each_net
def test_torch_scores_what_numpy_placed_by(name):
    """The update must score what the rollout saw: the argmax of its scores is the first plan."""
    prepared, rollout = rolled(name, draw_problem(5, n_tables=9), plans=1, random=False)
    learner = PolicyLearner(name, [prepared], PolicyConfig())
    learner.w = {k: torch.from_numpy(v) for k, v in untrained(name).weights.items()}
    logits = learner.device_logits(prepared, rollout)
    assert (logits[0].argmax(-1).numpy() == rollout.placed.devices[0, 0]).all()


@each_net
def test_a_plan_names_its_policy_and_counts_as_one(name):
    problem = CASES["unequal memory"]
    search = sharder(name, untrained(name))
    plan = search(problem, small_problem_model(problem), seed=3)
    assert (plan.provenance["evals"], plan.provenance["algorithm"]) == (1, name)
    assert plan.provenance["policy"] == name
    assert plan == search(problem, small_problem_model(problem), seed=3, budget=Budget(evals=64))


@pytest.mark.parametrize("name", ["dreamshard", "dreamshard_direct"])
def test_cuts_by_columns_spread_a_hot_table(name):
    hot = Table("hot", 100, 64, 50.0)
    tables = (*(Table(f"cold{i}", 9000 + i, 8, 1.0) for i in range(3)), hot)
    problem = Problem("hot", tables, Topology((Device(2**22),) * 4), 48)
    model = replace(small_problem_model(problem), gather_gbps=1, lookup_ns=0)  # columns are what costs
    policy = untrained(name)
    # Who has more is scored lower.
    balancing = {"choice.weight": -abs(policy.weights["choice.weight"])}
    policy = replace(policy, weights={**policy.weights, **balancing})
    whole, cut = (sharder(n, policy)(problem, model) for n in (name, f"{name}_columns"))
    check_plan(cut, problem)
    assert {p.shard for p in whole.placements} == {Shard.whole(t) for t in tables}
    assert sum(p.shard.table == hot for p in cut.placements) > 1
    assert cut.provenance["predicted_ms"] < whole.provenance["predicted_ms"]


def test_weights_at_their_limits_still_make_a_plan_that_fits():
    problem = CASES["tight memory"]
    for name in NETS:
        policy = untrained(name)
        huge = {k: np.sign(v) * np.float32(1e6) if v.ndim == 2 else v for k, v in policy.weights.items()}
        search = sharder(name, replace(policy, weights=huge))
        check_plan(search(problem, small_problem_model(problem), budget=Budget(evals=4)), problem)


def test_features_are_those_of_the_papers_and_of_a_shards_own_columns():
    table = Table("t", 1000, 32, 5.0, Zipf(1.1))
    whole, half = shard_features([Shard.whole(table), Shard(table, 0, 1000, 0, 16)], 64)
    assert len(FEATURES) == len(whole) == 21 and whole[4:].sum() == pytest.approx(1, abs=1e-5)
    assert np.exp(whole[:4]) == pytest.approx([32, 1000, 5.1, 128_000], rel=1e-5)
    changed = np.flatnonzero(whole != half)
    assert changed.tolist() == [0, 3] and np.exp(half[3]) == pytest.approx(64_000, rel=1e-5)


def test_a_power_laws_reuse_bins_are_those_of_its_streams():
    table = Table("t", 5000, 16, 8.0, Zipf(1.05))
    drawn = np.mean(
        [access.reuse_from_ids(streams.draw_lookups(table, 256, seed)[0], 256).bins for seed in range(20)], 0
    )
    assert access.reuse_histogram(table, 256) == pytest.approx(drawn, abs=0.02)


@each_net
def test_halves_that_meet_on_a_device_look_like_the_shard_that_they_become(name):
    problem = draw_problem(4, n_tables=5)
    widest = max(problem.tables, key=lambda t: t.dim)
    whole = [Shard.whole(t) for t in problem.tables if t != widest]
    space = search_space_by_columns(
        problem, MODEL, [*whole, *cut_into_equal_parts(Shard.whole(widest), 4, 4)], cut=False
    )
    cache, policy = space.cache, untrained(name)
    item = cache.item_by_name[widest.name]
    blocks = int(cache.size[item]) // 4
    keys = [(s, int(cache.size[s])) for s in range(5) if s != item] + [(item, blocks)] * 4
    rollouts = Rollouts(policy.net, policy.weights, 20, np.random.default_rng(0))
    rollout = rollouts.roll_out(space, np.array([keys]))
    latents, in_order = rollouts.latents_of_cached_shards(cache), np.array(keys)[rollout.placed.order[0]]
    met = 0
    for k in range(20):
        held = np.zeros((5, len(cache.speed)), int)
        np.add.at(held, (in_order[:, 0], rollout.placed.devices[0, k]), in_order[:, 1])
        met += (held[item] > blocks).any()
        expected = latents[cache.option_numbers(np.arange(5)[:, None], held)].sum(0)
        assert rollout.latents[0, k] == pytest.approx(expected / cache.speed[:, None], abs=1e-3)
    assert met


@each_net
def test_a_cost_network_learns_from_all_shards_of_a_plan(name):
    """Also from halves of a table that no device can hold, which are alike."""
    tables = (Table("big", 100_000, 64, 5.0), *(Table(f"small{i}", 1000, 16, 2.0) for i in range(3)))
    problem = Problem("cut", tables, Topology((Device(20 << 20),) * 4), 48)
    prepared, rollout = rolled(name, problem, plans=1)
    assert len(rollout.placed.devices[0, 0]) == 5
    plan = CostSample.of_first_plan(prepared, rollout.placed)
    latents = untrained(name).net.shard_latents(untrained(name).weights, plan.x)
    sums = np.stack([latents[plan.devices == d].sum(0) for d in range(4)])
    assert sums == pytest.approx(rollout.latents[0, 0], abs=1e-4)


@each_net
def test_an_update_gives_illegal_devices_no_share(name):
    problem = CASES["pinned"]
    prepared = PreparedProblem(problem, small_problem_model(problem))
    learner = PolicyLearner(name, [prepared], PolicyConfig(plans_each=4))
    rollout = learner.roll_out_randomly(prepared, 4)
    shares = learner.device_logits(prepared, rollout).softmax(-1).detach().numpy()
    somewhere = rollout.placed.legal[0].any(-1)  # a step without a legal device teaches nothing
    legal, shares = rollout.placed.legal[0][somewhere], shares[somewhere]
    assert not legal.all() and (shares[~legal] == 0).all() and (shares[legal] > 0).all()
