"""What is handed to TRL's loss is there inside, once, and known to have been taken."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from memprof.grpo.step.objective import LogprobInjection, Values  # noqa: E402


def test_what_is_handed_over_is_there_inside_only() -> None:
    handover, logps, entropies = LogprobInjection(), torch.zeros(1, 2), torch.ones(1, 2)
    assert handover.take() is None
    with handover.of(Values(logps, entropies)):
        assert not handover.was_taken
        found = handover.take()
        assert found is not None
        assert found[0] is logps
        assert found[1] is entropies
    assert handover.was_taken
    assert handover.take() is None
    with handover.of(Values(logps, entropies)):
        pass
    assert not handover.was_taken


def test_an_error_inside_ends_the_handover() -> None:
    handover = LogprobInjection()
    with pytest.raises(KeyError), handover.of(Values(torch.zeros(1), torch.zeros(1))):
        raise KeyError
    assert handover.take() is None


def test_constants_do_not_count_as_taken() -> None:
    """A loss that asks under ``no_grad`` gets the values, and none of the graph."""
    handover, leaf = LogprobInjection(), torch.ones(1, 2, requires_grad=True)
    with handover.of(Values(leaf, leaf)):
        with torch.no_grad():
            constants = handover.take()
        assert constants is not None
        assert torch.equal(constants[0], leaf)
        assert not constants[0].requires_grad
        assert not handover.was_taken
        handover.take()
        assert handover.was_taken
