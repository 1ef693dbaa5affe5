import numpy as np

from shardcore.measure import timing


def test_a_median_is_known_better_with_more_and_steadier_repeats():
    rng = np.random.default_rng(0)
    assert timing.known_to([1.0] * 5) == float("inf")
    assert timing.known_to([1.0] * 6) == 0
    few, many = rng.normal(10, 1, 10), rng.normal(10, 1, 1000)
    assert timing.known_to(many) < timing.known_to(few)


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    rng = np.random.default_rng(1)
    for n in (8, 15, 40):
        hits = 0
        for _ in range(1000):
            values = np.sort(rng.lognormal(0, 0.5, n))
            reach = 0.98 * np.sqrt(n)
            low, high = int(max(0, np.floor((n - 1) / 2 - reach))), int(min(n - 1, np.ceil((n - 1) / 2 + reach)))
            hits += values[low] <= 1 <= values[high]
            assert timing.known_to(values) == (values[high] - values[low]) / 2 / values[n // 2]
        assert hits >= 940


def test_spread_is_quartiles():
    assert timing.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == timing.Spread(3.0, 2.0, 4.0, 5)
