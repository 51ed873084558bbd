"""Whole training runs of the lean trainer beside TRL's, with the same completions fed to both."""

from __future__ import annotations

import difflib
import gc
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.grpo.trainers import (
    Rollouts,
    batch,
    build,
    logged,
    loss_and_gradients,
    saved_llama,
    tiny_llama,
    with_policies,
)

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.trl, pytest.mark.usefixtures("only_new_tensors")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_llama(tmp_path_factory.mktemp("model") / "tiny")


def assert_tracks(theirs: Any, ours: Any, rel: float = 2e-4) -> None:
    """Equal logs step by step, and parameters that moved alike."""
    rows, lean_rows = logged(theirs), logged(ours)
    assert len(rows) == len(lean_rows)
    for row, lean_row in zip(rows, lean_rows, strict=True):
        assert lean_row.keys() == row.keys()
        for name, value in row.items():
            assert lean_row[name] == pytest.approx(value, rel=rel, abs=2e-5, nan_ok=True), (row["step"], name)


def run_both(model: str, folder: Path, lean: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    rollouts = Rollouts()
    theirs = build("trl", model, folder, **settings)
    rollouts.record(theirs)
    theirs.train()
    ours = build("lean", model, folder, **settings, **(lean or {}))
    rollouts.replay(ours)
    ours.train()
    return theirs, ours


SETTINGS: dict[str, dict[str, Any]] = {
    "full-kl": {"beta": 0.04},
    "lora-kl": {"beta": 0.04, "lora": True, "gradient_checkpointing": True},
    "off-policy": {"num_iterations": 2, "gradient_accumulation_steps": 2, "loss_type": "grpo"},
    "autocast": {"bf16": True, "lora": True},
    "entropy": {"top_entropy_quantile": 0.5, "gradient_accumulation_steps": 2, "entropy_coef": 0.01},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_training_tracks_trl(name: str, checkpoint: str, tmp_path: Path) -> None:
    lean = {"weights": "as_given"}  # TRL's dtype, so that the arithmetic is the same
    theirs, ours = run_both(checkpoint, tmp_path, lean, max_steps=4, **SETTINGS[name])
    assert any(row.get("reward_std", 0) > 0 for row in logged(theirs))
    assert any(abs(row.get("grad_norm", 0)) > 1e-3 for row in logged(theirs))
    assert_tracks(theirs, ours, rel=5e-2 if name == "autocast" else 2e-4)


def test_checkpoints_are_interchangeable(checkpoint: str, tmp_path: Path) -> None:
    """Four steps; the last two resumed by the other trainer from the first's checkpoint."""
    rollouts = Rollouts()
    straight = build("trl", checkpoint, tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    rollouts.record(straight)
    straight.train()
    halves = Rollouts()
    halves.kept = rollouts.kept[2:]
    lean = build("lean", checkpoint, tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    halves.replay(lean)
    lean.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-2"))
    assert_tracks(straight, lean)

    again = build("lean", checkpoint, tmp_path / "again", max_steps=4, save_strategy="steps", save_steps=2)
    rollouts.replay(again)
    again.train()
    back = build("trl", checkpoint, tmp_path, max_steps=4)
    halves.replay(back)
    back.train(resume_from_checkpoint=str(tmp_path / "again" / "lean" / "checkpoint-2"))
    assert_tracks(straight, back)


def test_the_hosts_reference_is_the_devices(checkpoint: str, tmp_path: Path) -> None:
    """The streamed reference gives the very numbers of a copy on the device, and leaves its weights where they were."""
    host, device = (
        build("lean", checkpoint, tmp_path / place, beta=0.04, reference=place, max_tokens_per_piece=30)
        for place in ("host", "device")
    )
    assert host._host_reference is not None
    assert device._host_reference is None
    before = [parameter.data_ptr() for parameter in host.ref_model.parameters()]
    inputs = batch(6)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        found = [t._get_per_token_logps_and_entropies(t.ref_model, ids, mask, 13)[0] for t in (host, device)]
        mask[:, -13] = 0  # a hole: not cut into pieces
        holes = [t._get_per_token_logps_and_entropies(t.ref_model, ids, mask, 13)[0] for t in (host, device)]
    assert torch.equal(*found)
    assert torch.equal(*holes)
    assert found[0].abs().sum() > 1
    assert [parameter.data_ptr() for parameter in host.ref_model.parameters()] == before


def test_the_hosts_reference_goes_together_with_packing(checkpoint: str, tmp_path: Path) -> None:
    """Its hidden states are padded, whatever the policy's are; it was given packed rows and failed."""
    packed, padded = (
        build("lean", checkpoint, tmp_path / str(packing), beta=0.04, packing=packing, max_tokens_per_piece=60)
        for packing in (True, False)
    )
    assert packed._host_reference is not None
    inputs = batch(6)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        found = [t._get_per_token_logps_and_entropies(t.ref_model, ids, mask, 13)[0] for t in (packed, padded)]
    assert torch.equal(*found)
    assert found[0].abs().sum() > 1


def test_bf16_is_as_near_to_float64_as_trl(tmp_path: Path) -> None:
    """In pure bf16 the errors of activations dominate; splitting must not add to them."""
    errors: dict[str, list[float]] = {"trl": [], "lean": []}
    for seed in range(3):
        model = tiny_llama(torch.bfloat16, seed=seed)
        exact = build("trl", model.double(), tmp_path)
        inputs = with_policies(exact, batch(8, seed=seed), beta=0.0)
        truth = loss_and_gradients(exact, inputs)[1]
        for kind in errors:
            lean = {"max_tokens_per_piece": 1} if kind == "lean" else {}
            trainer = build(kind, model.bfloat16(), tmp_path, **lean)
            found = loss_and_gradients(trainer, inputs)[1]
            errors[kind] += [float((found[k].double() - truth[k]).norm() / truth[k].norm()) for k in truth]
    mean = {kind: math.fsum(values) / len(values) for kind, values in errors.items()}
    assert 0 < mean["lean"] <= mean["trl"], mean


def test_generation_in_sub_batches(checkpoint: str, tmp_path: Path) -> None:
    """Every prompt is answered, in its place, a few at a time."""
    trainer = build("lean", checkpoint, tmp_path, generation="generate", generation_batch=3, max_steps=1, top_k=1)
    whole = build("lean", checkpoint, tmp_path, max_steps=1, top_k=1)
    prompts = [[4 + i % 7, 9, 5 + i] for i in range(8)]
    sizes: list[int] = []
    generate = trainer.model.generate
    trainer.model.generate = lambda **given: (sizes.append(len(given["input_ids"])), generate(**given))[1]
    trainer.model_wrapped = trainer.model
    answers = trainer._generate_single_turn(prompts, None, {}, 4)
    assert sizes == [3, 3, 2]
    assert answers == whole._generate_single_turn(prompts, None, {}, 4)


def test_a_plain_grpo_config_will_do(checkpoint: str, tmp_path: Path) -> None:
    """The import is the only line that differs."""
    from trl import GRPOConfig

    from memprof.grpo import LeanGRPOTrainer
    from tests.grpo.trainers import length_reward, prompts, tokenizer

    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4,
                      max_completion_length=6, max_steps=1, report_to="none", save_strategy="no")  # fmt: skip
    trainer = LeanGRPOTrainer(checkpoint, length_reward, args, prompts(), processing_class=tokenizer())
    assert trainer.args is args
    assert trainer.args.prefix_sharing is False
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_callback_sees_where_the_memory_is(checkpoint: str, tmp_path: Path) -> None:
    """Phases and categories of a lean step with the host's reference; and watching changes nothing."""
    from memprof import MemProfCallback, analyze

    settings: dict[str, Any] = {"max_steps": 2, "beta": 0.04, "max_tokens_per_piece": 1}
    alone = build("lean", checkpoint, tmp_path / "alone", **settings)
    alone.train()
    unwatched = logged(alone)
    del alone  # its tensors would be nobody's
    gc.collect()
    watched = build("lean", checkpoint, tmp_path / "watched", **settings)
    watched.add_callback(MemProfCallback(output_dir=tmp_path / "seen", report=False))
    watched.train()
    assert logged(watched) == unwatched

    (file,) = (tmp_path / "seen").glob("*.pickle")
    report = analyze(str(file)).to_dict()
    phases = [span["phase"] for span in report["phases"] if span["phase"] != "other"]
    head = phases.index("forward")
    assert phases[:head] == ["generate", "reference_logprobs", "reward"]
    # Four rows, one by one, then the loss's value and the backward of the trainer, which has nothing left to add.
    assert phases[head:] == ["forward", "backward"] * 5 + ["optimizer_step"]
    trained = sum(4 * parameter.numel() for parameter in watched.model.parameters())
    categories = report["peak"]["categories"]
    for name, copies in {"weights": 1, "reference_model": 1, "gradients": 1, "optimizer_state": 2}.items():
        assert categories[name] == pytest.approx(copies * trained, rel=0.01), name
    assert categories.get("unattributed", 0) < 0.001 * report["peak"]["active_bytes"]


def test_the_example_is_trls_but_for_the_import_and_a_line(tmp_path: Path) -> None:
    plain, lean = ((ROOT / "examples" / f"{kind}_grpo.py").read_text().splitlines() for kind in ("trl", "lean"))
    changed = [line for line in difflib.ndiff(plain[6:], lean[6:]) if line[0] in "+-"]
    assert [line for line in changed if "import" not in line] == [
        "-     trainer = GRPOTrainer(",
        "+     trainer = LeanGRPOTrainer(",
    ]
    command = [str(ROOT / "examples" / "lean_grpo.py"), "--tiny", "--out", str(tmp_path)]
    done = forked.python(command, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "_memprof" / "report.html").is_file()
