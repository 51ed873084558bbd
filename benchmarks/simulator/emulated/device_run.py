"""Train with TRL on the CUDA device that is there, as settings say, and print what its allocator counted.

    echo '{"settings": {...}, "loaded": false}' | python -m benchmarks.simulator.emulated.device_run

A child process: torch's CUDA build runs here, on an emulated device (or a real one). ``settings`` are
:class:`memprof.config.settings.Settings`; ``loaded`` gives the trainer the model by name, from a checkpoint of zeros,
instead of a model that was built on the device. The answer is the last line of standard output.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memprof.config.settings import Settings
from memprof.config.to_trl_config import four_bit_arguments, grpo_arguments

COUNTERS = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "requested_bytes": "requested_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
    "ooms": "num_ooms",
    "retries": "num_alloc_retries",
}


def main() -> None:
    question = json.loads(sys.stdin.read())
    import torch

    history = question.get("history")
    if history:
        torch.cuda.memory._record_memory_history(max_entries=10_000_000)
    found = train_here(Settings.from_dict(question["settings"]), question.get("loaded", False))
    if history:
        torch.cuda.memory._dump_snapshot(history)
    print(json.dumps(found))


def train_here(settings: Settings, loaded: bool = False) -> dict[str, Any]:
    """Train on the device that is here; what its allocator counted at its highest, and the error it ended with."""
    with tempfile.TemporaryDirectory() as folder:
        error = _train(settings, loaded, folder)
    return {**counted(), "error": error}


def counted(names: Iterable[str] = tuple(COUNTERS)) -> dict[str, int]:
    """Return what the allocator counted at its highest, in bytes, and how often it failed, by these names."""
    import torch

    stats = torch.cuda.memory_stats()
    return {name: stats[COUNTERS[name]] for name in names}


def _train(settings: Settings, loaded: bool, folder: str) -> str | None:
    import torch

    from memprof.simulate.fake_cuda.images import shapes_unchecked

    try:
        with _completions_of_full_length(settings), _no_infinity(), shapes_unchecked():
            trainer = build(settings, loaded, folder)
            trainer.train()
    except torch.OutOfMemoryError as error:
        return str(error).partition("\n")[0]
    return None


def build(settings: Settings, loaded: bool, folder: str) -> Any:
    """Build the trainer: the model on the device, or a checkpoint that the trainer loads itself."""
    import torch
    from transformers import BitsAndBytesConfig

    from memprof.simulate.fake_cuda.fakes import materialize
    from memprof.simulate.fake_cuda.images import HostValues, fake_images, images_of, processor_of, put_images
    from memprof.simulate.trainer.build import MEASURED, WARM_UP, adapter_of, dataset_of, make_tokenizer
    from memprof.simulate.trainer.checkpointing import choose_checkpointing
    from memprof.simulate.trainer.models import load_config
    from memprof.simulate.trainer.recipes import classes_of, config_of
    from memprof.simulate.trainer.rewards import reward_function
    from memprof.simulate.trainer.supervised import supervised_trainer

    config = load_config(settings.model)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 2, 1, None
    checkpoint = Path(folder) / "model"
    write_checkpoint(config, settings.dtype, checkpoint)
    if loaded:
        model: Any = str(checkpoint)
    else:
        # As a model that was moved there lies in memory: built on the device, tied weights would be made twice.
        with torch.device("meta"):
            model = _kind(config).from_config(config, dtype=getattr(torch, settings.dtype))
        materialize(model, torch.device("cuda"))
        model.config._name_or_path = str(checkpoint)  # where the reference is loaded from
        if settings.recipe != "lean":
            choose_checkpointing(model, settings.checkpointing)
    unattended = {
        "output_dir": folder, "logging_strategy": "no", "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "learning_rate": 1e-6,
    }  # fmt: skip
    if settings.supervised:
        return supervised_trainer(
            settings, model, make_tokenizer(), adapter_of(settings), {**unattended, "max_steps": WARM_UP + MEASURED}
        )
    trainer_type, arguments_type = classes_of(settings)
    asked = grpo_arguments(settings)
    for name in ("use_vllm", "vllm_mode"):
        asked.pop(name, None)
    if not loaded:
        asked.pop("model_init_kwargs")
    elif settings.load_in_4bit:
        asked["model_init_kwargs"]["quantization_config"] = BitsAndBytesConfig(**four_bit_arguments(settings))
    cycle = max(1, settings.generation_steps // settings.gradient_accumulation_steps) * settings.num_iterations
    arguments = arguments_type(
        max_steps=(WARM_UP + MEASURED) * cycle, **unattended, **asked, **config_of(settings)
    )
    data, processing, images = dataset_of(settings), tokenizer(), images_of(settings, config)
    if images is None:
        data = data.map(lambda row: {"prompt": "a" * settings.prompt_length})
    else:
        processing = processor_of(images, settings.prompt_length, processing, HostValues.of)
    trainer = trainer_type(
        model=model, args=arguments, train_dataset=data, processing_class=processing,
        reward_funcs=reward_function, peft_config=adapter_of(settings),
    )  # fmt: skip
    if images is not None:
        put_images(trainer, images, settings.prompt_length)
        fake_images(trainer, images)  # kernels compute nothing here either
    trainer.generation_config.eos_token_id = trainer.model.generation_config.eos_token_id = None
    return trainer


def tokenizer() -> Any:
    """Make a tokenizer of one token a letter."""
    from tokenizers import pre_tokenizers

    from memprof.simulate.trainer.build import make_tokenizer

    made = make_tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return made


@contextlib.contextmanager
def _completions_of_full_length(settings: Settings) -> Iterator[None]:
    """Where nothing is to be generated, answer TRL with completions of full length, while open."""
    if settings.generation != "none" or settings.supervised:
        yield
        return
    with completions_of(settings.completion_length, rloo=settings.trainer == "rloo"):
        yield


@contextlib.contextmanager
def completions_of(length: int, rloo: bool = False) -> Iterator[None]:
    """Answer TRL's trainer with completions of so many tokens, while open: nothing generates."""
    from memprof.compat import patching
    from memprof.compat import trl as names

    def answer(self: Any, prompt_ids: list[Any], *_: Any, **__: Any) -> Any:
        made = [[0] * length for _ in prompt_ids]
        return made if rloo else (made, None)

    with patching((names.RLOO_GENERATE if rloo else names.GENERATE_SINGLE_TURN, answer)):
        yield


@contextlib.contextmanager
def _no_infinity() -> Iterator[None]:
    """Let a loss scaler find no infinity in gradients whose values were not computed, while open."""
    from memprof.compat import patching
    from memprof.compat import torch as names

    step_if_finite: Any = names.STEP_IF_FINITE.get()

    def steps(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        for found in optimizer_state["found_inf_per_device"].values():
            found.zero_()
        return step_if_finite(self, optimizer, optimizer_state, *args, **kwargs)

    with patching((names.STEP_IF_FINITE, steps)):
        yield


def _kind(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def write_checkpoint(config: Any, dtype: str, folder: Path) -> None:
    """Write a checkpoint of zeros that takes no room on the disk: a header, and a hole where the weights are."""
    import torch

    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = _kind(config).from_config(config, dtype=getattr(torch, dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    tied = set(getattr(model, "_tied_weights_keys", None) or {}) if config.tie_word_embeddings else set()
    place = 0
    for name, tensor in model.state_dict().items():
        if name not in tied:
            size = tensor.numel() * tensor.element_size()
            header[name] = {"dtype": names[dtype], "shape": list(tensor.shape), "data_offsets": [place, place + size]}
            place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    config.dtype, config.architectures = getattr(torch, dtype), [type(model).__name__]
    config.save_pretrained(folder)


if __name__ == "__main__":
    main()
