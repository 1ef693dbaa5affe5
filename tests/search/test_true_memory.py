"""Plans fit by all that they take, where searches count too little: many ids on many devices."""

import pickle
from dataclasses import replace

import pytest
from conformance import model_for
from shapes import on_hosts
from shardcore.search.true_memory import TRIES, within_memory

from shardcore import memory
from shardcore.constraints import Constraints
from shardcore.errors import Infeasible, Overfull
from shardcore.publish.replan import ReplanConfig, replan
from shardcore.search import SHARDERS, Budget, portfolio
from shardcore.search.anneal.sharder import Search
from shardcore.search.shards import priced
from shardcore.step import memory_account
from shardcore.types import Problem, Table

BUDGET = Budget(evals=2000)
TABLES = tuple(Table(f"t{i}", 1500, dim, pooling) for i, (dim, pooling) in enumerate(
    [(76, 100.0), (40, 60.0), (64, 80.0)]))


def anneal_columns(given, model, budget):
    """A search that looks at its own count of memory only."""
    search = Search(given, model, budget.start(), seed=0)
    for _ in search.rounds("columns"):
        pass
    return priced(search.placements, given, model)


def problem(memory_bytes: int = 1 << 34, devices: int = 8) -> Problem:
    return Problem("ids", TABLES, on_hosts("a" * devices, memory_bytes), 4096, "exact_sgd")


def used(plan, of: Problem) -> int:
    return max(memory.used_bytes(plan, of))


def tight() -> Problem:
    """Memory so tight that a search takes a plan that does not fit."""
    ample = used(anneal_columns(problem(), model_for(problem()), budget=BUDGET), problem())
    shares = range(99, 89, -1)
    return next(given for given in (problem(ample * share // 100) for share in shares) if overfull(given))


def overfull(given: Problem) -> bool:
    try:
        plan = anneal_columns(given, model_for(given), budget=BUDGET)
    except Infeasible:
        return False
    return used(plan, given) > memory.held_bytes(given)[0]


def test_a_search_that_counts_too_little_searches_again():
    given = tight()
    plan = SHARDERS["anneal_columns"](given, model_for(given), budget=BUDGET)
    assert used(plan, given) <= memory.held_bytes(given)[0]
    assert memory.require_fits(plan, given) == memory.used_bytes(plan, given)
    assert plan == SHARDERS["anneal_columns"](given, model_for(given), budget=BUDGET)


def stubborn(given: Problem, seen: list):
    """A sharder that finds the same plan whatever is reserved."""
    plan = anneal_columns(problem(), model_for(problem()), budget=BUDGET)

    def sharder(asked, model, *, budget=None):
        seen.append((asked.constraints.reserved_bytes, budget))
        return plan

    return within_memory(sharder), used(plan, given)


def test_it_gives_up_with_the_first_reason_and_keeps_its_budget():
    given, seen = problem(4 << 20), []
    sharder, taken = stubborn(given, seen)
    with pytest.raises(Overfull, match=r"device \d of problem 'ids' would hold .* too little") as raised:
        sharder(given, model_for(given), budget=Budget(seconds=8))
    too_much = taken - (4 << 20)
    assert raised.value.too_much == too_much
    cautious = memory_account.local_batch_bytes(given, share=0.0) - memory_account.local_batch_bytes(given)
    reserved = [more for more, _ in seen]
    assert len(seen) == TRIES and reserved[:2] == [0, cautious]
    assert all(b == a + max(a, too_much) for a, b in zip(reserved[1:], reserved[2:], strict=False))
    seconds = [budget.seconds for _, budget in seen]
    assert seconds[:3] == pytest.approx([16 / 3, 4 / 3, 2 / 3]) and sum(seconds) <= 8


@pytest.mark.parametrize("searched", ["portfolio", "anneal", "anneal_columns", "replan", "fixed kinds"])
def test_no_search_is_tried_more_often_however_it_is_called(searched, monkeypatch):
    """Only plans of the last search fit. Were a search wrapped twice, each try would be several."""
    given, searches, asked = problem(), [], []
    old = anneal_columns(given, model_for(given), budget=Budget(evals=100))
    if searched == "fixed kinds":
        given = replace(given, constraints=Constraints(kinds=(("t0", ("row",)),)))

    def require_fits(plan, of):
        asked.append(plan)
        if len(asked) < TRIES:
            raise Overfull("too much", 1)

    monkeypatch.setattr(portfolio, "require_fits", require_fits)
    monkeypatch.setattr(portfolio, "repaired", lambda *_: None)
    monkeypatch.setattr(portfolio, "Search", lambda of, *args: searches.append(of) or Search(of, *args))
    if searched == "replan":
        replan(old, given, model_for(given), ReplanConfig(budget=Budget(evals=100), max_moved_tables=9))
    else:
        name = "anneal" if searched == "fixed kinds" else searched
        SHARDERS[name](given, model_for(given), budget=Budget(evals=100))
    assert len(searches) == TRIES


def test_what_fits_is_searched_once():
    seen = []
    sharder, _ = stubborn(problem(), seen)
    sharder(problem(), model_for(problem()), budget=BUDGET)
    assert seen == [(0, BUDGET)]


def test_the_reason_travels_between_processes():
    error = pickle.loads(pickle.dumps(Overfull("device 0 would hold 3 GiB", 7)))
    assert (str(error), error.too_much) == ("device 0 would hold 3 GiB", 7)


def test_less_is_reserved_if_nothing_is_found_with_so_much():
    """Memory for the plan that is found with half as much reserved as the second search reserves."""
    given = tight()
    good = SHARDERS["anneal_columns"](given, model_for(given), budget=BUDGET)
    bad = anneal_columns(given, model_for(given), BUDGET)
    cautious = memory_account.local_batch_bytes(given, share=0.0) - memory_account.local_batch_bytes(given)
    asked_for = []

    def sharder(asked, model, *, budget=None):
        asked_for.append(reserved := asked.constraints.reserved_bytes)
        if reserved >= 0.9 * cautious:
            raise Infeasible("nothing")
        return good if reserved >= 0.4 * cautious else bad

    assert within_memory(sharder)(given, model_for(given)) == good
    assert asked_for == [0, cautious, cautious // 2]
