"""Train once for real in a process of its own: ``python -m benchmarks.gpu.real_run JSON``; print one JSON line.

Weights are random (nothing can be downloaded), token ids are random, completions have their full length.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

WORDS = 64
STEPS = 2
#: The step that ``watch="one"`` records: optimizer state and cached memory are there, the peak is no news.
RECORDED = 3
_MEASURED = "allocated_bytes", "reserved_bytes"


def build_trainer(settings: Any, folder: Path, steps: int, callbacks: list[Any], shrink: bool, lean: bool) -> Any:
    """Build the trainer of ``settings``, on the GPU where there is one."""
    import torch
    from datasets import Dataset

    from memprof.simulate.trainer.build import adapter_of

    if lean:
        from memprof.grpo import LeanGRPOConfig as Config
        from memprof.grpo import LeanGRPOTrainer as Trainer
    else:
        from trl import GRPOConfig as Config
        from trl import GRPOTrainer as Trainer

    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    model = build_model(settings, folder, shrink)
    rng = random.Random(0)
    lengths = [settings.prompt_length] * 8
    if settings.padding == "worst":
        lengths = [max(1, settings.prompt_length - i) for i in range(8)]
    prompts = [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(n)) for n in lengths]
    arguments = Config(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_generations=settings.num_generations,
        max_completion_length=settings.completion_length,
        generation_kwargs={"min_new_tokens": settings.completion_length},
        gradient_checkpointing=settings.checkpointing != "none",
        beta=settings.beta,
        loss_type=settings.loss_type,
        optim=settings.optim,
        bf16=settings.mixed_precision == "bf16",
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        model_init_kwargs={"dtype": settings.dtype} if settings.beta and settings.lora_r is None else None,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(), peft_config=adapter_of(settings), callbacks=callbacks,
    )  # fmt: skip
    return trainer


def build_model(settings: Any, folder: Path, shrink: bool) -> Any:
    """Make random weights of the right shapes where they are used; on disk too where a reference is loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    from memprof.simulate.trainer.models import load_config

    config = load_config(settings.model)
    if shrink:
        text = config.get_text_config()
        text.num_hidden_layers, text.vocab_size = 2, min(text.vocab_size, 1024)
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    if settings.beta and settings.lora_r is None:
        model.save_pretrained(folder / "model")
        model.config._name_or_path = str(folder / "model")
    return model


def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that vary within a group, so that there is something to learn."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def tokenizer() -> Any:
    """Make a tokenizer whose words are tokens, so that a prompt's length is what was asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def clocks() -> tuple[Any, Any]:
    """Make two callbacks, the first and the last of a trainer's.

    The last takes each step's ``seconds`` from after the other callbacks' ``on_step_begin`` to after their
    ``on_step_end``: what they write of an earlier step is not in it. ``held`` are the seconds that the others took at
    each step's beginning, and ``began`` the time of day then.
    """
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    class First(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.at, self.began = 0.0, []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.at = now()
            self.began.append(time.time())

    class Last(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds, self.held, self._at = [], [], 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._at = now()
            self.held.append(self._at - first.at)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(now() - self._at)

    first = First()
    return first, Last()


def watcher(how: str, folder: Path) -> list[Any]:
    """Make the callback; per-phase peaks by counters are off, so that torch's own peak stays readable.

    ``how``: ``none``; ``counters`` (nothing is written); ``record`` (as by default); ``one`` (step :data:`RECORDED`).
    """
    from memprof import MemProfCallback

    if how == "none":
        return []
    steps = {"counters": 10**9, "record": None, "one": RECORDED}[how]
    return [MemProfCallback(output_dir=folder, steps=steps, table=False, reset_peaks=False)]


def dump_seconds(folder: Path, held: list[float], began: list[float]) -> dict[str, float] | None:
    """Return what writing step :data:`RECORDED` took, which begins when the step after it does.

    ``held`` is how long training waited; ``written`` and ``reported`` are when the files were whole. None where nothing
    was written, or no step came after it.
    """
    found = next(folder.glob(f"step-{RECORDED:06d}.*.pickle"), None)
    if found is None or len(began) <= RECORDED:
        return None
    report = found.with_suffix(".json")
    told = {"held": held[RECORDED], "written": found.stat().st_mtime - began[RECORDED]}
    return {**told, "reported": report.stat().st_mtime - began[RECORDED]} if report.exists() else told


def counters() -> dict[str, int]:
    """Return torch's own peaks, and NVML's figure for this process where it can be had."""
    import torch

    from memprof.recording.system.outside_torch import Outside

    if not torch.cuda.is_available():
        return {}
    taken = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    found = dict(zip(_MEASURED, taken, strict=True))
    _, _, nvml, *_ = Outside(torch.cuda.current_device()).row(0, None)
    return found if nvml is None else {**found, "nvml_bytes": nvml}


def digest(model: Any) -> str:
    """Hash every trainable parameter's bytes."""
    import torch

    total = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.requires_grad:
            total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def execute(
    settings: dict[str, Any],
    shrink: bool,
    *,
    steps: int = STEPS,
    lean: bool = False,
    watch: str = "none",
    keep: str | None = None,
    fraction: float | None = None,
) -> dict[str, Any]:
    """Train, and tell what was seen; an out-of-memory error is part of what was seen.

    Args:
        settings: as ``Settings.to_dict`` writes them.
        shrink: two layers and 1,024 words at the most instead of the model's own.
        steps: of the optimizer.
        lean: with memprof's trainer instead of TRL's.
        watch: as :func:`watcher`'s.
        keep: folder for what is written; without it nothing stays.
        fraction: share of the GPU's memory that the process may take.
    """
    import torch

    from memprof.config.settings import Settings

    wanted = Settings(**{**settings, "lora_target_modules": ("all-linear",)})
    if fraction:
        torch.cuda.set_per_process_memory_fraction(fraction)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        first, last = clocks()
        callbacks = [first, *watcher(watch, folder / "_memprof")]
        trainer = build_trainer(wanted, folder, steps, callbacks, shrink, lean)
        trainer.add_callback(last)  # after those that the trainer adds by itself
        error = None
        try:
            trainer.train()
        except torch.OutOfMemoryError as caught:
            error = str(caught)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
        told = {"losses": losses, "grad_norms": norms, "step_seconds": last.seconds, "error": error, **counters()}
        told |= {"held_seconds": last.held, "dump_seconds": dump_seconds(folder / "_memprof", last.held, first.began)}
        if error is None:
            told["parameters"] = digest(trainer.model)
        return told


if __name__ == "__main__":
    print("RESULT " + json.dumps(execute(**json.loads(sys.argv[1]))))
