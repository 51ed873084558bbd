"""Blocks without a history: what their sizes may say, and what they may not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from memprof import analyze
from memprof.attribution.loaded_models import is_language_model
from memprof.vocabulary import Category
from tests.attribution.runs import LOAD, PARAMETERS, Result, Run, train
from tests.synthetic import SnapshotBuilder, frame

KIB = 2**10
LAYERS, COPIES = 6, 4


def four_copies(stack: list[str]) -> SnapshotBuilder:
    """Four equal copies of a small model's sizes, all with one stack (or none)."""
    run = SnapshotBuilder()
    sizes = [5000 * KIB, 3000 * KIB, *([2 * KIB] * (2 * LAYERS + 1)), *([1024 * KIB, 4096 * KIB] * LAYERS)]
    for _ in range(COPIES):
        for size in sizes:
            run.live[run.ghost(size)]["frames"] = [frame(name) for name in stack]
    return run


def test_four_copies_without_stacks_read_as_a_training_state_with_alternatives(tmp_path: Path) -> None:
    analysis = analyze(four_copies([]).save(tmp_path / "state.pickle"))
    total = analysis.peak.active_bytes
    assert analysis.peak.categories["optimizer_state"] == pytest.approx(total / 2)
    assert analysis.peak.categories["gradients"] == pytest.approx(total / 4)
    assert all(a.alternatives for a in analysis.explain("peak", category="optimizer_state"))


def test_blocks_made_in_one_place_are_no_copies_of_each_other(tmp_path: Path) -> None:
    analysis = analyze(four_copies(["allocate", "init_weights", "main"]).save(tmp_path / "state.pickle"))
    assert analysis.peak.categories["weights"] == analysis.peak.active_bytes


def quantised_llama(run: SnapshotBuilder) -> None:
    """A 22-layer Llama in 4 bits as peft prepares it: fp32 embedding and head of one size, fp32 norms, scales."""
    for size, count in ((262_144_000, 2), (5_767_168, 66), (2_097_152, 44), (720_896, 66), (262_144, 88),
                        (8192, 45), (65_536, 198)):  # fmt: skip
        for _ in range(count):
            run.ghost(size)


def test_four_bit_matrices_in_pairs_are_one_model(tmp_path: Path) -> None:
    # Every count but that of the norms (2 x 22 + 1) is even: three matrices a layer, 66 in 22 layers.
    run = SnapshotBuilder()
    quantised_llama(run)
    analysis = analyze(run.save(tmp_path / "qlora.pickle"))
    assert analysis.peak.categories["weights"] == analysis.peak.active_bytes


def test_two_whole_models_are_a_model_and_its_reference(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    quantised_llama(run)
    quantised_llama(run)
    analysis = analyze(run.save(tmp_path / "two.pickle"))
    assert analysis.peak.categories["weights"] == analysis.peak.active_bytes / 2
    assert analysis.peak.categories["reference_model"] == analysis.peak.active_bytes / 2


def parameters(hidden: int, ffn: int, layers: int) -> list[int]:
    """Bytes of a bf16 language model's parameters: an embedding, its layers, norms."""
    layer = [hidden * hidden * 2, hidden * ffn * 2, ffn * hidden * 2 + 512, hidden * 2, hidden * 2]
    return [50_000 * hidden * 2, *layer * layers, hidden * 2]


def trained_beside(others: list[int]) -> tuple[Run, Result]:
    """A step over a model that was there before the history, beside ``others`` that no module ever reads."""
    run = Run()
    for size in [*PARAMETERS, *others]:
        run.ghost(size, Category.WEIGHTS)
    train(run, steps=1, reference=False)
    return run, run.attribute()


def test_a_model_that_never_runs_is_another_model_with_its_alternatives() -> None:
    other = parameters(640, 2560, 6)
    _, result = trained_beside(other)
    rows = result.said.category == Category.REWARD_MODEL.code
    assert Counter(result.timeline.requested[rows].tolist()) == Counter(other)
    alternatives = {result.said.alternative_sets[i] for i in result.said.alternatives[rows]}
    assert alternatives == {(Category.VALUE_MODEL, Category.REFERENCE_MODEL, Category.WEIGHTS)}


def test_master_weights_are_not_another_model() -> None:
    _, result = trained_beside([2 * size for size in PARAMETERS])
    assert not (result.said.category == Category.REWARD_MODEL.code).any()


def test_a_loaded_model_that_never_runs_is_another_model() -> None:
    run, other = Run(), parameters(640, 2560, 6)
    run.load(40, Category.WEIGHTS)
    addresses = [run.alloc(size, [*LOAD, "train.py:44 main", "train.py:99 <module>"]) for size in other]
    train(run, steps=1, reference=False)
    result = run.attribute()
    assert {result.category(address) for address in addresses} == {Category.REWARD_MODEL}
    assert {result.rule(address) for address in addresses} == {"models.never-runs"}


def test_a_language_model_has_layers_and_an_embedding() -> None:
    sizes = Counter(parameters(640, 2560, 6))
    embedding = max(sizes)
    assert is_language_model(sizes)
    assert not is_language_model(Counter({size: count for size, count in sizes.items() if size != embedding}))
    assert not is_language_model(Counter({embedding: 1, 640 * 2: 13}))


def test_what_a_forward_made_in_a_dump_without_history_is_no_weight(shared: Path) -> None:
    """Attention's outputs, kept by a guidance of Stable Diffusion, keep their stacks; its weights take 2 GiB."""
    report = analyze(shared / "snapshots" / "sd-guidance-legacy-list-t22.pickle").to_dict()
    held = report["peak"]["categories"]
    assert held["weights"] / 2**30 == pytest.approx(2.02, abs=0.01)
    assert held["activations"] / 2**30 == pytest.approx(1.09, abs=0.01)
    assert [place["share"] for place in report["headline"]["places"]] == [pytest.approx(1.0, abs=0.01)]
