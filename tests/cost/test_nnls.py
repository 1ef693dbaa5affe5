"""Laws are recovered, with no negative rate."""

import numpy as np
import pytest

from shardcore.cost.nnls import fit_nonnegative_rates


def test_law_with_no_negative_rates():
    rng = np.random.default_rng(0)
    terms = rng.random((200, 4))
    truth = np.array([0.5, 0.0, 2.0, 1.0])
    assert fit_nonnegative_rates(terms, terms @ truth) == pytest.approx(truth, abs=1e-6)
    measured = terms @ truth
    measured[:20] *= 5  # outliers
    assert fit_nonnegative_rates(terms, measured) == pytest.approx(truth, rel=1e-3, abs=1e-3)
    assert (fit_nonnegative_rates(terms, terms @ np.array([1.0, -0.5, 1.0, 1.0])) >= 0).all()


def test_terms_that_cannot_be_told_apart_share_their_rate():
    x = np.random.default_rng(0).random((50, 1)) + 1
    assert fit_nonnegative_rates(np.concatenate([x, x], 1), 2 * x[:, 0]) == pytest.approx([1, 1], rel=1e-3)
