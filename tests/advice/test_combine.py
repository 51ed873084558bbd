"""The search for a set that fits: over runs whose memory is a formula, and over a real simulated one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memprof.advice.candidates import candidates_for
from memprof.advice.combine import combine
from memprof.advice.evaluate import evaluate_advice, run_of_row
from memprof.advice.recorded_run import AdvisedRun
from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.plan.simulations import SimulatedRow
from memprof.report.codec import to_builtins
from tests.advice.reports import GIB, MODEL, report
from tests.plan.rows import simulated_row
from tests.report.plain import as_report

SHAPE = ModelShape.of(MODEL)


def _phases(row: SimulatedRow) -> dict[str, dict[str, int]]:
    """The categories of each phase, as a report has them."""
    found: dict[str, dict[str, int]] = to_builtins(row)["phase_categories"]
    return found


class Reckoned:
    """Answers as a simulation would, by closed forms of its own (not those of the estimates)."""

    def __init__(self, gpu: str | None = None) -> None:
        self.gpu = gpu
        self.asked: list[Settings] = []

    def run(self, wanted: list[Settings]) -> list[SimulatedRow]:
        self.asked += wanted
        return [self._row(s) for s in wanted]

    def run_each(self, wanted: list[Settings], refused: dict[int, str]) -> list[SimulatedRow | None]:
        return [*self.run(wanted)]

    def _row(self, s: Settings) -> SimulatedRow:
        from memprof.config.fits import MARGIN
        from memprof.config.gpus import find_gpu

        count = SHAPE.parameters
        wide = 4 if s.dtype == "float32" else 2
        trained = SHAPE.adapter_parameters(s.lora_r) if s.lora_r else count
        weights = count * (0.6 if s.load_in_4bit else wide)
        state = trained * (2.1 if "8bit" in s.optim else 2 * wide)
        tokens = s.per_device_train_batch_size * s.sequence_length
        kept = SHAPE.layers * tokens * SHAPE.hidden * wide * (1.3 if s.checkpointing == "full" else 9)
        if s.checkpointing == "offloaded":
            kept = tokens * SHAPE.hidden * wide * 4
        standing = {"weights": int(weights), "optimizer_state": int(state)}
        alive = {
            "forward": {**standing, "activations": int(kept)},
            "optimizer_step": {**standing, "gradients": int(trained * wide)},
        }
        phases = {name: sum(held.values()) for name, held in alive.items()}
        need = int(max(phases.values()) * 1.05) + GIB // 2
        total = find_gpu(self.gpu).total_bytes if self.gpu else 0
        return simulated_row(
            peak_bytes=max(phases.values()), peak_phase=max(phases, key=lambda n: phases[n]), phases=phases,
            phase_categories=alive, device_peak_bytes=need, fits=need * (1 + MARGIN) <= total,
        )  # fmt: skip


FULL = Settings(model="m", gradient_checkpointing=False, generation="none", prompt_length=256, completion_length=1792)
LIKE = AdvisedRun(peaks=(), settings=FULL, shape=SHAPE)


def _combined(gpu: str, settings: Settings = FULL, **more: Any) -> tuple[Any, Reckoned]:
    machine = Reckoned(gpu)
    return combine(settings, gpu, machine, LIKE, **more), machine  # type: ignore[arg-type]


def test_what_fits_is_left_alone() -> None:
    found, machine = _combined("H200")
    assert found.fits
    assert found.changes == ()
    assert len(machine.asked) == 1
    assert "fits as it is" in found.sentence


def test_one_change_where_one_is_enough() -> None:
    found, _ = _combined("A100-40GB")
    assert found.fits
    assert len(found.changes) == 1
    assert found.changes[0].exact  # what keeps the gradients is tried before what does not


def test_no_member_of_a_set_can_be_left_out() -> None:
    found, machine = _combined("12GB")
    assert found.fits
    assert len(found.changes) >= 2
    assert Settings.from_dict(found.settings) in machine.asked  # the whole set was simulated, not reckoned from parts
    runs = [run_of_row(machine._row(s), LIKE, s) for s in machine.asked]
    known = {candidate.id: candidate.changes for run in runs for candidate in candidates_for(run)}
    for spare in found.changes:
        settings = FULL
        for change in found.changes:
            if change.id != spare.id:
                settings = settings.with_(**known[change.id])
        assert not Reckoned("12GB").run([settings])[0].fits, spare.id


def test_nothing_fits_a_card_that_is_too_small() -> None:
    found, _ = _combined("1GB")
    assert not found.fits
    assert found.after_bytes < found.before_bytes
    assert "Nothing found that fits" in found.sentence


def test_it_stops_looking_when_its_time_is_over() -> None:
    ticks = iter([0.0, 1.0, 11.0, 12.0])
    found, machine = _combined("1GB", seconds=10, clock=lambda: next(ticks))
    assert not found.fits
    assert len(machine.asked) == 2  # the unchanged run, and one change


def test_what_the_recorded_run_held_more_counts() -> None:
    light, _ = _combined("A100-40GB")
    heavy, _ = _combined("A100-40GB", shift=20 * GIB)
    assert heavy.before_bytes == light.before_bytes + 20 * GIB
    assert heavy.after_bytes * 1.03 <= 40338 * 2**20
    assert len(heavy.changes) > len(light.changes)


def test_simulated_savings_replace_estimates_while_time_lasts() -> None:
    machine = Reckoned()
    before = machine.run([FULL])[0]
    measured = report(
        _phases(before), FULL, reserved_bytes=2 * before.peak_bytes, inactive_split_bytes=30 * GIB
    )
    segments = {"action": "", "costs": "", "exact": True, "basis": "estimated", "saves_bytes": 25 * GIB}
    measured["advice"] = [{"id": "expandable_segments", "peak": "device", **segments}]  # by replay
    found = evaluate_advice(as_report(measured), FULL, machine, seconds=1e9)  # type: ignore[arg-type]
    assert {e.basis for e in found.entries} == {"simulated"}
    half = next(e for e in found.entries if e.id == "micro_batch_4")
    changed = FULL.with_(per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=2)
    assert half.saves_bytes == before.peak_bytes - Reckoned().run([changed])[0].peak_bytes
    saved = [e.saves_bytes for e in found.entries]
    assert saved[1:] == sorted(saved[1:], reverse=True)

    ticks = iter([0.0, 1.0, 2.0, 3.0, 100.0])
    machine = Reckoned()
    short = evaluate_advice(as_report(measured), FULL, machine, seconds=10, batch=2, clock=lambda: next(ticks))  # type: ignore[arg-type]
    assert len(machine.asked) == 3  # the unchanged run, and the first two changes
    slow = iter([0.0, 6.0, 6.0])  # what took six of ten seconds once is not begun again
    machine_too_slow = Reckoned()
    evaluate_advice(as_report(measured), FULL, machine_too_slow, seconds=10, batch=2, clock=lambda: next(slow))  # type: ignore[arg-type]
    assert len(machine_too_slow.asked) == 1
    assert {e.basis for e in short.entries} == {"simulated", "estimated"}
    idle = next(e for e in short.entries if e.id == "expandable_segments")
    assert (idle.basis, idle.saves_bytes) == ("estimated", 25 * GIB)


@pytest.mark.parametrize("rounds", [2, 4])
def test_what_is_read_first_is_simulated_though_the_simulations_change_the_order(rounds: int) -> None:
    class Dear(Reckoned):
        """Simulations that find nearly nothing saved by what the estimates put first."""

        def run(self, wanted: list[Settings]) -> list[SimulatedRow]:
            batch = FULL.per_device_train_batch_size
            return [
                replace(row, peak_bytes=full - GIB) if settings.per_device_train_batch_size < batch else row
                for settings, row in zip(wanted, super().run(wanted), strict=True)
            ]

    before = Reckoned().run([FULL])[0]
    full = before.peak_bytes
    measured = report(_phases(before), FULL)
    ticks = iter([0.0, *[0.0] * (2 * rounds + 1), *[1e9] * 9])
    found = evaluate_advice(as_report(measured), FULL, Dear(), seconds=10, batch=1, clock=lambda: next(ticks))  # type: ignore[arg-type]
    assert found.simulated == rounds
    assert found.estimated
    assert found.entries[0].basis == "simulated"


def test_a_refused_change_is_named_and_costs_no_other() -> None:
    class Choosy(Reckoned):
        def run_each(self, wanted: list[Settings], refused: dict[int, str]) -> list[SimulatedRow | None]:
            refused.update({i: "no kernel for that" for i, settings in enumerate(wanted) if settings.load_in_4bit})
            return [None if i in refused else row for i, row in enumerate(self.run(wanted))]

    measured = report(_phases(Reckoned().run([FULL])[0]), FULL)
    found = evaluate_advice(as_report(measured), FULL, Choosy(), seconds=1e9)  # type: ignore[arg-type]
    assert found.refused["qlora"] == "no kernel for that"
    assert "simulated" in {e.basis for e in found.entries}


def test_an_unknown_card_is_refused() -> None:
    with pytest.raises(UsageError, match="give its memory"):
        combine(FULL, "huge", Reckoned(), LIKE)  # type: ignore[arg-type]
