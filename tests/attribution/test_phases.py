"""Phases from marks, tags, annotations and stacks."""

from __future__ import annotations

from memprof.vocabulary import Category
from tests.attribution.runs import CALL, LAYER, LOSS, MAIN, MAKE_GRADS, Run


def test_the_latest_started_mark_decides() -> None:
    run = Run()
    start = run.builder.time_us
    for _ in range(4):
        run.alloc(8, MAIN)
    marks = [
        {"phase": "evaluate", "start_us": start, "end_us": start + 100, "step": 7, "within": None},
        {"phase": "generate", "start_us": start + 15, "end_us": start + 25, "step": 7, "within": "evaluate"},
        {"phase": "nonsense", "start_us": start + 15, "end_us": start + 25},
    ]
    track = run.attribute({"phases": marks}).said.track
    assert track.source == "marks"
    assert [(s.phase, s.step, s.within) for s in track.spans] == [
        ("evaluate", 7, None), ("generate", 7, "evaluate"), ("evaluate", 7, None),
    ]  # fmt: skip


def test_allocations_without_frames_after_a_forward_are_its_backward() -> None:
    run = Run()
    run.alloc(8, [*LAYER, *LOSS, *MAIN])
    for _ in range(6):
        run.alloc(8, [])
    run.alloc(8, [*LAYER, *LOSS, *MAIN])
    assert run.attribute().phases() == ["forward", "backward", "forward"]


def test_a_stray_frameless_allocation_is_no_backward() -> None:
    run = Run()
    for stack in ([*LAYER, *LOSS, *MAIN], [], [*LAYER, *LOSS, *MAIN]):
        run.alloc(8, stack)
    assert run.attribute().phases() == ["forward"]


def test_frameless_allocations_in_generation_stay_there() -> None:
    run = Run()
    run.alloc(8, [*LAYER, "train.py:10 generate", *MAIN])
    for _ in range(6):
        run.alloc(8, [])
    assert run.attribute().phases() == ["generate"]


def test_recomputation_belongs_to_backward() -> None:
    run = Run()
    run.alloc(8, [*LAYER, *LOSS, *MAIN])
    run.alloc(8, [*MAKE_GRADS, *MAIN])
    redone = run.alloc(1 << 20, [*LAYER, "torch/utils/checkpoint.py:1170 unpack_hook"])
    result = run.attribute()
    assert result.phases() == ["forward", "backward"]
    assert result.category(redone) is Category.ACTIVATIONS
    row = result.timeline.address.tolist().index(redone)
    assert result.said.details[result.said.detail[row]] == "recomputed"


def test_annotations_place_what_has_no_stack() -> None:
    run = Run()
    run.alloc(8, MAIN)
    start = run.builder.time_us + 5
    run.alloc(8, [])
    raw = run.raw()
    raw["external_annotations"] = [
        {"stage": stage, "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": time}
        for stage, time in (("START", start), ("END", start + 10))
    ]
    from memprof.attribution.pipeline import attribute
    from memprof.snapshot import snapshot_from_raw
    from memprof.timeline.timeline import build_timeline

    snapshot = snapshot_from_raw(raw)
    assert [s.phase for s in attribute(snapshot, build_timeline(snapshot)).track.spans] == ["other", "optimizer_step"]


def test_a_phase_peak_is_reached_by_the_phase_itself() -> None:
    """Frees do not open a phase: teardown after a step is no peak of ``other``."""
    run = Run()
    big = run.alloc(1 << 20, [*LAYER, *LOSS, *MAIN])
    run.free(big, ["train.py:94 main", MAIN[1]])
    assert run.attribute().phases() == ["forward"]


def test_unnamed_passes_are_told_by_call_site() -> None:
    run = Run()

    def model_call(line: int) -> list[str]:
        return ["model.py:60 forward", CALL, f"train.py:{line} main", MAIN[1]]

    for _ in range(2):
        run.alloc(8, [*LAYER, "train.py:10 generate", *MAIN])
        run.alloc(8, model_call(40))
        run.alloc(8, model_call(41))
        run.alloc(8, model_call(42))
        run.alloc(8, ["train.py:43 main", MAIN[1]])
        run.alloc(8, [*MAKE_GRADS, *MAIN])
        for _ in range(4):
            run.alloc(8, [])
    assert run.attribute().phases() == ["generate", "old_logprobs", "reference_logprobs", "forward", "backward"] * 2


def test_evaluation_is_said_beside_the_phase() -> None:
    run = Run()
    evaluation = ["transformers/trainer.py:4400 evaluation_loop", *MAIN]
    run.alloc(8, [*LAYER, "train.py:10 generate", *evaluation])
    run.alloc(8, evaluation)
    spans = run.attribute().said.track.spans
    assert [(s.phase, s.within) for s in spans] == [("generate", "evaluate"), ("evaluate", None)]


def test_generation_without_a_name_is_known_by_its_decoding() -> None:
    run = Run()
    rollout, prompt, train_line = ["loop.py:7 do_it", *MAIN], ["loop.py:6 do_it", *MAIN], ["loop.py:30 main", MAIN[1]]
    embed, model = "torch/nn/modules/sparse.py:189 forward", [CALL, "model.py:60 forward", CALL]
    for _ in range(2):
        cache = run.alloc(1 << 20, ["loop.py:5 do_it", *MAIN])
        run.free(run.alloc(1 << 16, [embed, *model, *prompt]))
        for _ in range(6):
            run.free(run.alloc(1 << 10, [embed, *model, *rollout]))
            run.alloc(64, ["loop.py:8 do_it", *MAIN])
        run.free(cache)
        run.alloc(1 << 18, [embed, *model, *train_line])
        run.alloc(8, [*MAKE_GRADS, *MAIN])
        for _ in range(5):
            run.alloc(64, [])
    assert run.attribute().phases() == ["generate", "forward", "backward"] * 2


def test_batches_of_graphs_are_no_generation() -> None:
    """Evaluation runs the model again and again, on graphs of every size, behind torch's own wrapper."""
    run = Run()
    wrapper = ["torch/nn/parallel/data_parallel.py:193 forward", CALL]
    small, large = ["gnn.py:8 one_epoch", *MAIN], ["gnn.py:30 main", MAIN[1]]
    embed, model = "torch/nn/modules/sparse.py:189 forward", [CALL, "model.py:60 forward", CALL]
    for _ in range(2):
        for batch in range(8):
            run.free(run.alloc((1 + batch) << 12, [embed, *model, *wrapper, *small]))
        run.alloc(1 << 18, [embed, *model, *wrapper, *large])
        run.alloc(8, [*MAKE_GRADS, *MAIN])
        for _ in range(5):
            run.alloc(64, [])
    assert "generate" not in run.attribute().phases()
