"""List the changes to a run whose settings are known: when each applies, which settings it sets, what it saves.

By subject: training (the lean trainer has its own), then generation. ``changes.toml`` has their words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memprof.advice import savings as effects
from memprof.advice.candidate import Candidate, proposed
from memprof.advice.recorded_run import AdvisedRun, PhaseMaximum
from memprof.advice.report_only import RANK, an_adapter
from memprof.config.optimizers import optimizer
from memprof.config.to_trl_config import NF4, adapter_text, written
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.config.settings import Settings, TrainerSettings

# transformers' own option; TRL calls gradient_checkpointing_enable again after each rollout, without it.
_OFFLOAD = (
    "gradient_checkpointing=True; model.gradient_checkpointing_enable = lambda *_, **__: "
    'model._activation_checkpointing_enable({"use_reentrant": False}, 1, True)'
)
_ADAMS = ("adamw_torch", "adamw_torch_fused")


def candidates_by_settings(s: Settings) -> list[Candidate]:
    """List the changes that apply to a run of these settings."""
    if s.supervised:
        return [candidate for make in _SUPERVISED for candidate in make(s)]
    own = (_pieces, _lean_checkpointing, _lean_generation) if s.lean else (_micro_batches, _checkpointing)
    both = (
        _precision, _adapters, _optimizer, _reference, _loss, _attention, _lengths, _sharding, _lean, _generation
    )  # fmt: skip
    return [candidate for make in (*own, *both) for candidate in make(s)]


def _count(n: int, what: str, several: str = "s") -> str:
    return f"{n} {what}{several if n > 1 else ''}"


def _micro_batches(s: TrainerSettings) -> Iterator[Candidate]:
    size = s.per_device_train_batch_size
    half = next((size // d for d in (2, 3, 5, 7) if size % d == 0), None)
    row = {"sft": "row", "dpo": "pair"}.get(s.trainer, "completion")
    packed = "With packing=True short rows share one, and a pass stays full." if s.trainer == "sft" else None
    for smaller in dict.fromkeys(n for n in (half, 1) if n is not None and n < size):
        times = size // smaller
        changes = {
            "per_device_train_batch_size": smaller,
            "gradient_accumulation_steps": s.gradient_accumulation_steps * times,
            **({} if s.supervised else {"steps_per_generation": s.generation_steps * times}),
        }
        effect, what = effects.smaller_micro_batch(smaller / size), _count(smaller, row)
        name = f"micro_batch_{smaller}"
        yield proposed("micro_batch", changes, effect, id=name, smaller=what, size=size, times=times, packed=packed)


def _checkpointing(s: Settings) -> Iterator[Candidate]:
    now = s.checkpointing
    if now == "none":
        generation = None if s.supervised else "generation as before"
        changes = {"gradient_checkpointing": True}
        yield proposed("checkpointing", changes, effects.checkpointed, generation=generation)
        yield proposed("selective_checkpointing", {"gradient_checkpointing": "selective"}, effects.checkpointed)
    if now not in ("auto", "offloaded") and s.device != "cpu":
        how = "gradient_checkpointing=True, activation_offloading=True" if s.supervised else _OFFLOAD
        more = "Every layer's forward also runs once more." if now == "none" else None
        effect = _checkpointed_and_offloaded if now == "none" else effects.offloaded_boundaries
        yield proposed("offloaded_checkpoints", {"gradient_checkpointing": "offloaded"}, effect, how=how, more=more)


def _checkpointed_and_offloaded(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    saved = dict(effects.checkpointed(run, peak))
    for name, n in effects.offloaded_boundaries(run, peak).items():
        saved[name] = saved.get(name, 0) + n
    return saved


def _precision(s: Settings) -> Iterator[Candidate]:
    if s.dtype != "float32" or s.device == "cpu":
        return
    name = "bf16_weights" if not s.has_adapter else "bf16_frozen_weights"
    yield proposed(name, {"dtype": "bfloat16"}, effects.half_precision, id="bf16_weights")


def _adapters(s: Settings) -> Iterator[Candidate]:
    if s.has_adapter and s.lora_r is None:  # IA3, prompt tuning: they train less than LoRA
        return
    if s.lora_r is None:
        also = "; the adapter switched off is the reference model" if s.beta or s.trainer == "dpo" else ""
        train, changes = an_adapter(), {"lora_r": RANK, "lora_target_modules": ("all-linear",)}
        yield replace(train, action=train.action + also, changes=changes)
    if s.load_in_4bit or s.device == "cpu":
        return
    changes = {"lora_r": s.lora_r or RANK, "load_in_4bit": True, "dtype": "bfloat16"}
    effect = effects.low_rank(s.lora_r or RANK, nf4=True)
    rank, adapter = (None, None) if s.lora_r else (RANK, adapter_text(RANK))
    generation = None if s.supervised else "more so in generation"
    yield proposed("qlora", changes, effect, nf=NF4, generation=generation, rank=rank, adapter=adapter)


def _optimizer(s: Settings) -> Iterator[Candidate]:
    if s.optim == "adamw_torch":
        yield proposed("fused_adamw", {"optim": "adamw_torch_fused"}, effects.fused)
    if s.optim not in _ADAMS or s.device == "cpu" or s.sharding == "fsdp2":
        return
    for name in ("adamw_8bit", "paged_adamw_8bit"):
        yield proposed(name, {"optim": name}, effects.coarser_state(name), package=optimizer(name).package)


def _reference(s: Settings) -> Iterator[Candidate]:
    if s.beta and not s.has_adapter:
        yield proposed("no_reference", {"beta": 0.0}, effects.all_of(Category.REFERENCE_MODEL))


def _loss(s: TrainerSettings) -> Iterator[Candidate]:
    if s.recipe in ("trl-full-logits", "trl-in-place-logits", "trl-0.14"):
        yield proposed("tiled_loss", {"recipe": "trl"}, effects.tiled_logits)


def _attention(s: Settings) -> Iterator[Candidate]:
    if s.device == "cpu":
        return
    if s.attn == "math":
        yield proposed("sdpa", {"attn": "auto"}, effects.without_masks)
    elif s.attn == "auto" and s.padding == "worst":
        kernel = written({"attn": "flash"})
        yield proposed("flash_attention", {"padding": "none"}, effects.without_masks, kernel=kernel)


def _lengths(s: TrainerSettings) -> Iterator[Candidate]:
    length, prompt = s.completion_length, s.prompt_length
    if length >= 16:
        shorter = length // 2
        effect = effects.fewer_tokens((prompt + shorter) / s.sequence_length, shorter / length)
        changes = {"completion_length": shorter}
        yield proposed("shorter_completions", changes, effect, shorter=shorter, length=length)
    if prompt > 2 * length:
        shorter = prompt // 2
        effect = effects.fewer_tokens((shorter + length) / s.sequence_length, 1.0)
        yield proposed("shorter_prompts", {"prompt_length": shorter}, effect, shorter=shorter, length=prompt)


def _sharding(s: Settings) -> Iterator[Candidate]:
    if s.gpus > 1 and s.sharding == "ddp" and not s.has_adapter and s.device != "cpu":
        yield proposed("fsdp2", {"sharding": "fsdp2"}, effects.divided(s.gpus), gpus=s.gpus)


def _lean(s: Settings) -> Iterator[Candidate]:
    if not s.lean and s.device != "cpu":
        yield proposed("lean", {"recipe": "lean"}, trainer=s.trainer.upper())


# -- the lean trainer: what takes the place of smaller micro-batches and of transformers' checkpointing ----------------


def _pieces(s: TrainerSettings) -> Iterator[Candidate]:
    # Unless it is set, the trainer puts as many tokens together as are small beside the weights.
    together = min((s.max_tokens_per_piece or 0) // s.sequence_length, s.per_device_train_batch_size)
    if together > 1:
        effect = effects.smaller_micro_batch(1 / together)
        yield proposed("smaller_pieces", {"max_tokens_per_piece": s.sequence_length}, effect, together=together)


def _lean_checkpointing(s: Settings) -> Iterator[Candidate]:
    if s.checkpointing == "none":
        more, changes = 'checkpointing="auto"', {"gradient_checkpointing": "auto"}
        generation = "generation as before"
        yield proposed("checkpointing", changes, effects.checkpointed, more=more, generation=generation)
    if s.checkpointing in ("full", "selective") and s.device != "cpu":
        changes = {"gradient_checkpointing": "offloaded"}
        yield proposed("offloaded_checkpoints", changes, how='checkpointing="offloaded"')


def _lean_generation(s: Settings) -> Iterator[Candidate]:
    if s.generation != "hf":
        return
    count = s.per_device_train_batch_size * s.generation_steps
    together = min(s.generation_batch or count, count)
    if together > 1:
        half = -(-together // 2)
        effect, fewer = effects.generated_together(half / together), _count(half, "sequence")
        yield proposed("generated_together", {"generation_batch": half}, effect, fewer=fewer, together=together)


# -- generation --------------------------------------------------------------------------------------------------------


def _generation(s: Settings) -> Iterator[Candidate]:
    """List changes to how completions are generated, by what generates now: transformers, or vLLM in the process."""
    if s.generation == "hf":
        yield from _generation_batch(s)
        if s.cache_implementation == "dynamic" and s.device != "cpu":
            changes = {"cache_implementation": "quantized", "cache_dtype": "int4"}
            yield proposed("quantized_cache", changes, effects.quantized_cache)
        if s.device != "cpu":
            yield proposed("generate_elsewhere", {"generation": "none"}, effects.generated_elsewhere)
    elif s.generation == "vllm":
        yield from _engine(s)


def _generation_batch(s: Settings) -> Iterator[Candidate]:
    steps, fewer, batch = s.generation_steps, s.gradient_accumulation_steps, s.per_device_train_batch_size
    if steps > fewer and (batch * s.gpus * fewer) % s.num_generations == 0:
        effect, what = effects.generated_less(fewer / steps), _count(fewer, "micro-batch", "es")
        yield proposed("generation_batch", {"steps_per_generation": fewer}, effect, fewer=what, steps=steps)
    half = s.num_generations // 2
    if half >= 2 and batch % 2 == 0 and (batch // 2 * s.gpus * steps) % half == 0:
        changes = {"num_generations": half, "per_device_train_batch_size": batch // 2}
        effect = effects.fewer_tokens(0.5, 0.5)
        yield proposed("fewer_generations", changes, effect, half=half, all=s.num_generations)


def _engine(s: Settings) -> Iterator[Candidate]:
    share = s.vllm_gpu_memory_utilization
    if not s.engine_sleeps:
        yield proposed("vllm_sleep", {"vllm_enable_sleep_mode": True}, effects.asleep)
    if share > 0.2:
        less = round(share * 2 / 3, 2)
        changes, effect = {"vllm_gpu_memory_utilization": less}, effects.smaller_engine(less / share)
        yield proposed("vllm_share", changes, effect, less=f"{less:.0%}", share=f"{share:.0%}")


# -- trainers whose rows are given: nothing generates, and there is no KL term to leave out ---------------------------


def _given_reference(s: Settings) -> Iterator[Candidate]:
    if s.trainer == "dpo" and not s.has_adapter:
        yield proposed("precomputed_reference", effect=effects.all_of(Category.REFERENCE_MODEL))


def _shorter_rows(s: TrainerSettings) -> Iterator[Candidate]:
    length, shorter = s.sequence_length, s.sequence_length // 2
    if shorter >= 16:
        effect = effects.fewer_tokens(0.5, 0.5)
        yield proposed("shorter_rows", {"max_length": shorter}, effect, shorter=shorter, length=length)


_SUPERVISED = (
    _micro_batches, _checkpointing, _precision, _adapters, _optimizer, _given_reference, _attention, _shorter_rows,
    _sharding,
)  # fmt: skip
