"""The demo with its tiny model: really trained, recorded and reported, and held to closed forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl")

from memprof import MemProfCallback, analyze, load_snapshot
from memprof.demo import DemoResult, run, training
from memprof.demo.data import load_questions
from memprof.demo.model import Checkpoint, prepare_checkpoint
from memprof.demo.training import FULL, LORA, Recipe, Scale, TrainedRun, train
from memprof.errors import InputError, MemprofError
from memprof.report.codec import to_builtins
from tests.closed_forms import checks, facts_of

pytestmark = pytest.mark.trl

QUICK = Scale(completion_tokens=24)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, and much slower beside other programs."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo(quick_demo: DemoResult) -> DemoResult:
    return quick_demo


@pytest.fixture(scope="module")
def checkpoint(demo: DemoResult) -> Checkpoint:
    return prepare_checkpoint(demo.out / "_model", tiny=True)


def test_it_says_what_it_ran_on(demo: DemoResult) -> None:
    assert "random" in demo.model
    assert [done.name for done in demo.runs] == ["full", "lora"]


@pytest.mark.parametrize("name", ["full", "lora"])
def test_bytes_are_what_closed_forms_say(demo: DemoResult, checkpoint: Checkpoint, name: str) -> None:
    (done,) = (r for r in demo.runs if r.name == name)
    analysis = analyze(load_snapshot(done.snapshot))
    step = done.report.peak.step
    facts = facts_of(checkpoint.path, done.trained.metrics, step=step, lora=name == "lora", scale=QUICK)
    failed = [str(check) for check in checks(analysis, to_builtins(done.report), facts) if not check.holds]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_every_phase_of_a_step_is_there(demo: DemoResult, name: str) -> None:
    (done,) = (r for r in demo.runs if r.name == name)
    phases = {phase.phase for phase in done.report.phases}
    assert {"generate", "reward", "reference_logprobs", "forward", "backward", "optimizer_step"} <= phases


def test_files_hold_what_was_returned(demo: DemoResult) -> None:
    from tests.report.files import validate

    for done in demo.runs:
        written = json.loads(done.json.read_text(encoding="utf-8"))
        assert written == to_builtins(done.report)
        validate(written)
        assert done.html.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert not list(demo.out.glob("*.part"))


def test_it_ends_with_both_runs_side_by_side(demo: DemoResult) -> None:
    from tests.reports.html.test_html import packed

    assert demo.comparison == demo.out / "compare.html"
    data = packed(demo.comparison.read_text(encoding="utf-8"))
    total = next(row for row in data["report"]["rows"] if row["id"] == "total")
    assert total["at_peak"] == [done.report.peak.active_bytes for done in demo.runs]
    assert total["at_peak"][1] < total["at_peak"][0]
    assert len(data["timelines"]) == 2


def test_tensorboard_finds_scalars_and_recordings(demo: DemoResult) -> None:
    pytest.importorskip("tensorboard")
    from memprof.integrations.board.recordings import Recordings
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = Recordings([("", demo.out / "tensorboard")]).all()
    assert [recording.run for recording in found] == ["full", "lora"]
    for done, recording in zip(demo.runs, found, strict=True):
        assert recording.pickle.samefile(done.snapshot)
        board = EventAccumulator(str(demo.out / "tensorboard" / done.name))
        board.Reload()
        assert [event.step for event in board.Scalars("train/loss")] == [1, 2]
        (peak,) = board.Scalars("train/memory/peak_allocated")
        assert peak.value == pytest.approx(done.report.peak.allocated_bytes / 2**30, rel=1e-6)
        for category, size in done.report.peak.categories.items():
            if size:
                (shown,) = board.Scalars(f"train/memory/category/{category}")
                assert shown.value == pytest.approx(size / 2**30, rel=1e-6)


def test_the_runs_trained(demo: DemoResult) -> None:
    for done in demo.runs:
        assert max(done.trained.reward_stds) > 0
        assert done.trained.moved == done.trained.trainable


@pytest.mark.parametrize("recipe", [FULL, LORA], ids=["full", "lora"])
def test_watched_and_unwatched_runs_are_bit_equal(checkpoint: Checkpoint, tmp_path: Path, recipe: Recipe) -> None:
    def trained(*callbacks: object) -> TrainedRun:
        return train(recipe, QUICK, checkpoint, load_questions(8).items, tmp_path, callbacks)

    plain = trained()
    watched = trained(MemProfCallback(output_dir=tmp_path / "records", report=False))
    assert plain.learned
    assert list((tmp_path / "records").glob("*.pickle"))
    assert watched.metrics == plain.metrics
    assert watched.parameters == plain.parameters
    # The digest can tell runs apart at all.
    assert train(recipe, replace(QUICK, seed=8), checkpoint, load_questions(8).items, tmp_path).parameters != (
        plain.parameters
    )


def constant_reward(completions: list[object], **_: object) -> list[float]:
    return [0.5] * len(completions)


def test_constant_rewards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REWARDS", (constant_reward,))
    with pytest.raises(MemprofError, match="trained nothing"):
        run(tmp_path, quick=True)


def test_it_begins_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise MemprofError("enough")

    monkeypatch.setattr("memprof.demo.model.prepare_checkpoint", stop)
    with pytest.raises(MemprofError, match="enough"):
        run(tmp_path, quick=True)
    assert capsys.readouterr().err.startswith("This trains a small model with GRPO, ")


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        run(tmp_path / "file" / "demo", quick=True)
