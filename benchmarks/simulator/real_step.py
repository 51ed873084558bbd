"""Compare a real TRL run on the CPU with its simulation (``--device cpu``): every allocation in order, every peak.

    python -m benchmarks.simulator real-step lora --cache FOLDER

trains SmolLM2-135M for two steps (minutes on two cores), with the tensor trace on, then simulates the same settings,
and lists each difference. The tests do the same on a tiny model.
"""

from __future__ import annotations

import difflib
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result

TRAINING = ("reference_logprobs", "old_logprobs", "forward", "backward", "optimizer_step")
LENGTHS = {"per_device_train_batch_size": 4, "num_generations": 4, "prompt_length": 64, "completion_length": 64}
CASES: dict[str, dict[str, Any]] = {
    "lora": {"lora_r": 16, "gradient_checkpointing": True, "beta": 0.1},
    "full": {"gradient_checkpointing": False, "beta": 0.1},
}


def run_real(settings: Any, folder: str) -> dict[str, Any]:
    """Train as ``settings`` say, for real, with the tensor trace on; a raw snapshot.

    Tokens are sampled by TRL's own generation where ``settings.generation`` is ``hf``, made up where it is ``none``.
    A folder without weights gets random ones.
    """
    import torch

    from memprof.grpo.step.probe import ModelTraits
    from memprof.recording.guard import MethodPatcher
    from memprof.recording.session import Session
    from memprof.recording.trace.tensor_trace import TensorTrace
    from memprof.recording.trainer_phases import TrainerPhases
    from memprof.simulate.trainer.training import steps_callback

    session = Session(TensorTrace(torch.device("cpu"), stacks=None))
    trainer = _real_trainer(settings, folder)
    if settings.recipe == "lean":  # fake tensors are asked nothing: the few forwards of 34 tokens are left out
        trainer._probe = ModelTraits(counts_padding=True)
    session.add_model(trainer.model, "policy")
    if getattr(trainer, "ref_model", None) is not None:
        session.add_model(trainer.ref_model, "reference")
    if settings.reward_model is not None:
        session.add_model(trainer.reward_funcs[0], "reward")
    session.start()
    seams = MethodPatcher(session.guard, lambda error: None)
    phases = TrainerPhases(trainer, seams)
    phases.current = session
    trainer.add_callback(steps_callback(session, phases))
    try:
        trainer.train()
    finally:
        seams.restore()
        session.stop()
    return session.to_raw()


def _real_trainer(settings: Any, folder: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from memprof.simulate.fake_cuda import images
    from memprof.simulate.trainer import build
    from memprof.simulate.trainer.checkpointing import choose_checkpointing
    from memprof.simulate.trainer.rewards import RewardTokenizer, reward_function
    from memprof.simulate.trainer.rollout import fake_rollout

    checkpoint = _checkpoint(settings.model, folder)
    model = _kind(checkpoint).from_pretrained(checkpoint, dtype=getattr(torch, settings.dtype))
    if settings.recipe != "lean":  # which has its own
        choose_checkpointing(model, settings.checkpointing)
    rewards: dict[str, Any] = {"reward_funcs": reward_function}
    if settings.reward_model is not None:
        scores = AutoModelForSequenceClassification.from_config(
            AutoConfig.from_pretrained(settings.reward_model, num_labels=1), dtype=torch.bfloat16
        )
        rewards = {"reward_funcs": [scores], "reward_processing_classes": [RewardTokenizer(settings)]}
    seen = images.images_of(settings, model.config)
    if seen is not None:
        processor = images.processor_of(seen, settings.prompt_length, build.make_tokenizer())
        trainer = build.trainer_of(settings, model, folder, processor, **rewards)
    else:
        trainer = build.trainer_of(settings, model, folder, **rewards)
    if settings.supervised:
        return trainer
    fake_rollout(trainer, settings)
    if seen is not None:
        images.put_images(trainer, seen, settings.prompt_length)
    if settings.generation == "hf":
        del trainer._generate_single_turn  # TRL's own; no token it can sample ends a sequence
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = [99_998, 99_999]
    return trainer


def _checkpoint(model: str, folder: str) -> str:
    from transformers import AutoConfig

    if (Path(model) / "model.safetensors").is_file():
        return model
    path = str(Path(folder) / "model")
    _kind(model).from_config(AutoConfig.from_pretrained(model)).save_pretrained(path)
    return path


def _kind(model: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    seeing = hasattr(AutoConfig.from_pretrained(model), "vision_config")
    return AutoModelForImageTextToText if seeing else AutoModelForCausalLM


def births(raw: dict[str, Any], step: int, phase: str) -> list[tuple[int, str]]:
    """Return bytes and operation of every allocation of a phase, in order."""
    found = []
    for event in raw["device_traces"][0]:
        if event["action"] == "alloc":
            tags = dict(p.split("=", 1) for p in event["user_metadata"][8:].split(";") if "=" in p)
            if tags.get("step") == str(step) and tags.get("phase") == phase:
                found.append((event["size"], tags.get("op", "")))
    return found


def peaks(raw: dict[str, Any]) -> dict[tuple[Any, str], int]:
    """Return peak bytes by step and phase."""
    from memprof.analysis.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    return {(p.step, p.phase): p.allocated_bytes for p in analyze(snapshot_from_raw(raw)).phases}


def compare(simulated: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    """Compare both runs by phase: counts, every difference in the order of sizes, signed error of each peak."""
    rows = []
    sequences = [
        (step, phase, births(simulated, step, phase), births(real, step, phase))
        for step in (1, 2)
        for phase in TRAINING
    ]
    mine, theirs = peaks(simulated), peaks(real)
    for step, phase, one, other in sequences:
        if not one and not other:
            continue
        rows.append(
            {
                "step": step,
                "phase": phase,
                "allocations": [len(one), len(other)],
                "bytes": [sum(n for n, _ in one), sum(n for n, _ in other)],
                "differences": _differences(one, other),
                "peak_bytes": [mine[step, phase], theirs[step, phase]],
            }
        )
    generation = [
        {"step": s, "phase": "generate", "peak_bytes": [mine[s, "generate"], theirs[s, "generate"]]}
        for s in (1, 2)
        if (s, "generate") in mine and (s, "generate") in theirs
    ]
    for row in [*rows, *generation]:
        one, other = row["peak_bytes"]
        row["peak_error_percent"] = round(100 * (one - other) / other, 4)
    return {"training": rows, "generation": generation}


def _differences(one: list[tuple[int, str]], other: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return stretches in which the sizes differ; operations are given for both."""
    match = difflib.SequenceMatcher(None, [n for n, _ in one], [n for n, _ in other], autojunk=False)
    return [{"simulated": one[a:b], "real": other[c:d]} for kind, a, b, c, d in match.get_opcodes() if kind != "equal"]


@click.command(help=__doc__)
@click.argument("case", type=click.Choice(sorted(CASES)))
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="Where the model's checkpoint is kept.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(case: str, cache: Path, path: Path | None) -> None:
    from memprof.config.settings import Settings
    from memprof.demo.model import prepare_checkpoint
    from memprof.simulate.run import simulate_settings

    checkpoint = prepare_checkpoint(cache)
    settings = Settings(
        model=str(checkpoint.path), device="cpu", generation="hf", optim="adamw_torch", **LENGTHS, **CASES[case]
    )
    start = time.process_time()
    simulated = simulate_settings(settings, stacks=False)
    between = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        real = run_real(settings, folder)
    result = {
        "what": f"{checkpoint.note}: {case}, TRL on the CPU, simulated with --device cpu",
        "settings": {**LENGTHS, **CASES[case]},
        "cpu_seconds": {"simulated": round(between - start, 1), "real": round(time.process_time() - between, 1)},
        **compare(simulated, real),
    }
    write_result(result, path)
