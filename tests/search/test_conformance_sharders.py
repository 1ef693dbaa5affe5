"""The conformance suite for what ShardCore ships."""

import pytest
from suites import CHECKS, SHIPPED, suite

from shardcore.search import greedy

KIN = {*greedy.ORDERS, "anneal_columns", "torchrec", "dreamshard_direct_columns", "autoshard"}
LONG = {
    "test_plans_are_valid_and_say_where_they_come_from": KIN | {"anneal"},
    "test_infeasible_names_what_does_not_fit_and_what_would_help": {*SHIPPED},
    "test_a_hidden_plan_that_meets_pins_and_groups_gets_one": KIN | {"anneal"},
    "test_little_slack_is_enough_where_tables_may_be_cut": KIN | {"anneal"},
    "test_no_plan_is_cheaper_than_the_cheapest_of_all": {"anneal", "torchrec", "dreamshard_direct_columns"},
    "test_the_same_seed_gives_the_same_plan": {"anneal", "torchrec", "dreamshard_direct_columns"},
}
"""Checks that take longest, for sharders that share the code in question with another one: a portfolio anneals, and
all refuse by the same code, which tests/test_testing.py calls through "size_greedy"."""


def longest(sharder: str, check: str) -> bool:
    # That of "size_greedy" runs in tests/test_testing.py too.
    return sharder == "size_greedy" or sharder in LONG.get(check, ())


@pytest.mark.parametrize(
    "sharder, check",
    [
        pytest.param(sharder, check, marks=[pytest.mark.long] if longest(sharder, check) else [])
        for sharder in SHIPPED
        for check in CHECKS
    ],
)
def test_sharder(sharder, check):
    getattr(suite(sharder), check)()
