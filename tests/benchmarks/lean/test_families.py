"""A sweep that calls a gradient of nothing but NaN equal would find no fault."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_a_gradient_that_is_not_a_number_is_no_equal() -> None:
    from benchmarks.lean.equality.families import _apart

    one, other = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, float("nan")])}
    assert _apart(one, one) == 0.0
    for pair in ((one, other), (other, one), (other, other)):
        assert _apart(*pair) == float("inf")
