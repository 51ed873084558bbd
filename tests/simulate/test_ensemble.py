"""A verdict is the worst of a run's variants, which are replays of one simulation: each is held to a simulation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from memprof.reports.document.prediction import prediction_facts

from memprof.allocator.model import AllocatorOutOfMemory
from memprof.config.fits import MARGIN

MIB = 2**20


@pytest.fixture(scope="module")
def simulated(settings_for: Callable[..., Any]) -> Callable[..., Any]:
    """Simulate the small run, and analyse it."""

    def run(card: str = "80GiB", capacity: int | None = None, **changes: Any) -> Any:
        from memprof.config.gpus import find_gpu
        from memprof.simulate.evaluate import analyse
        from memprof.simulate.run import simulate_settings

        settings = settings_for(generation="none", **changes)
        return analyse(simulate_settings(settings, gpu=find_gpu(card), capacity=capacity, stacks=False))

    return run


@pytest.fixture(scope="module")
def analysis(simulated: Callable[..., Any]) -> Any:
    return simulated()


def _variants(analysis: Any, card: str) -> list[Any]:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.ensemble import variants_of

    return [variant.program for variant in variants_of(analysis, find_gpu(card))]


def _reserved(program: Any, capacity: int | None = None) -> int:
    from memprof.allocator.replay import reserved_within
    from memprof.allocator.settings import AllocatorSettings

    return reserved_within(program, AllocatorSettings(), capacity)


def test_a_replay_reserves_what_the_simulation_did(analysis: Any, simulated: Callable[..., Any]) -> None:
    own = _variants(analysis, "80GiB")[0]
    assert _reserved(own) == analysis.device_peak.reserved_bytes
    # Where the card is full, both run out of memory.
    room = int(analysis.timeline.active.max()) + 4 * MIB
    assert simulated(capacity=room).snapshot.run.oom
    with pytest.raises(AllocatorOutOfMemory):
        _reserved(own, room)


def test_a_run_of_unknown_lengths_has_variants_of_its_workspaces_alone(
    analysis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "snapshot", analysis.snapshot.with_run(config={"model": "of a script"}))
    own, other = _variants(analysis, "80GiB")
    assert _reserved(own) == analysis.device_peak.reserved_bytes
    assert int(other.requested.sum() - own.requested.sum()) == 2 * (32 * MIB - 8_519_680)


def test_a_card_known_by_size_has_every_workspace_and_a_named_one_its_own(analysis: Any) -> None:
    by_size, named = _variants(analysis, "80GiB"), _variants(analysis, "A100")
    assert (len(by_size), len(named)) == (4, 2)
    # Two of them: the caller's and the autograd engine's.
    assert int(by_size[2].requested.sum() - by_size[0].requested.sum()) == 2 * (32 * MIB - 8_519_680)


def test_other_workspaces_are_those_that_a_simulation_has(analysis: Any, simulated: Callable[..., Any]) -> None:
    assert _reserved(_variants(analysis, "80GiB")[2]) == simulated("H100").device_peak.reserved_bytes


@pytest.mark.parametrize("more", [1, -1])
def test_another_length_holds_what_a_simulation_of_it_does(
    analysis: Any, simulated: Callable[..., Any], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token longer is asked for only where nobody gave the prompts' length."""
    guessed = {**analysis.snapshot.run.config, "assumed": ["prompt_length"] if more > 0 else []}
    monkeypatch.setattr(analysis, "snapshot", analysis.snapshot.with_run(config=guessed))
    before, after = _variants(analysis, "A100")[:2]
    real = simulated(completion_length=21 + more).timeline.requested.sum() - analysis.timeline.requested.sum()
    assert int(after.requested.sum() - before.requested.sum()) == pytest.approx(int(real), rel=0.1)


@pytest.mark.parametrize("completion", [1, 8])
def test_a_short_completion_has_variants_near_the_run(simulated: Callable[..., Any], completion: int) -> None:
    """A length of a few tokens divides nearly every size: one token more is not 1/8 more of everything."""
    run = simulated(prompt_length=160, completion_length=completion)
    sizes = [int(program.requested.sum()) for program in _variants(run, "A100")]
    assert max(sizes) / min(sizes) < 1.05


def test_a_run_fits_where_its_worst_variant_does(settings_for: Callable[..., Any], analysis: Any) -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import evaluate

    settings = settings_for(generation="none")
    reserved = sorted(_reserved(program) for program in _variants(analysis, "80GiB"))
    assert reserved[-1] - reserved[0] >= 40 * MIB

    def verdict(room: int, **card: Any) -> Any:
        total = int((1 + MARGIN) * (room + find_gpu("24GB").context_bytes)) + MIB
        return evaluate(settings, find_gpu(f"{total // MIB + 1}MiB"), stacks=False)

    tight, roomy = verdict(analysis.device_peak.reserved_bytes + 4 * MIB), verdict(reserved[-1])
    assert (tight.verdict.fits, roomy.verdict.fits) == (False, True)
    told = tight.verdict.ensemble
    assert (told.members, told.failed) == (4, 2)
    assert (told.lowest_bytes, told.highest_bytes) == (reserved[0], reserved[-1])
    assert "; 2 of them run out of memory." in tight.verdict.sentence()
    report = json.loads(json.dumps(tight.analysis.to_dict()))
    assert report["fit"]["ensemble"] == {
        "members": 4, "failed": 2, "flushes": told.flushes, "lowest_bytes": reserved[0], "highest_bytes": reserved[-1],
    }  # fmt: skip
    assert any("4 variants need" in fact.note for fact in prediction_facts(tight.analysis.report))


def test_a_run_that_does_not_fit_is_not_said_to_fit_by_giving_memory_back(settings_for: Callable[..., Any]) -> None:
    from dataclasses import replace

    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import evaluate

    settings = settings_for(generation="none", prompt_length=80, completion_length=160, per_device_train_batch_size=8)
    card = replace(find_gpu("A100"), total_bytes=715 * MIB)
    squeezed = evaluate(settings, card, stacks=False).verdict
    assert (squeezed.fits, squeezed.flushes) == (True, True)
    assert "only fits because cached memory is freed" in squeezed.sentence()
    hostless = evaluate(settings.with_(host_memory="1GB"), card, stacks=False)
    assert (hostless.verdict.fits, hostless.verdict.flushes) == (False, False)
    assert hostless.analysis.to_dict()["fit"]["flushes"] is False
    assert "given back" not in hostless.verdict.sentence()
