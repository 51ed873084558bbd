"""List the changes worth considering for a run: what to set, what it costs, whether gradients stay.

By subject: training (the lean trainer has its own), generation, the allocator. Where a run's settings are not known,
:mod:`memprof.advice.report_only` lists what the categories alone suggest. What to paste is written by
:func:`memprof.config.to_trl_config.written`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memprof.advice import savings as effects
from memprof.advice.candidate import Candidate, Toll
from memprof.advice.recorded_run import Effect, Peak, Run
from memprof.advice.report_only import RANK, an_adapter, candidates_by_category, candidates_by_findings, is_open
from memprof.config.optimizers import optimizer
from memprof.config.to_trl_config import NF4, adapter_text, written
from memprof.vocabulary import EXPANDABLE_SEGMENTS

if TYPE_CHECKING:
    from memprof.config.settings import GenerationSettings, Settings, TrainerSettings

_EIGHT_BITS = {
    False: "As fast; embeddings' moments stay in 32 bits.",
    True: "A step waits for the moments that are on the host.",
}
# transformers' own option; TRL calls gradient_checkpointing_enable again after each rollout, without it.
_OFFLOAD = (
    "gradient_checkpointing=True; model.gradient_checkpointing_enable = lambda *_, **__: "
    'model._activation_checkpointing_enable({"use_reentrant": False}, 1, True)'
)
_ADAMS = ("adamw_torch", "adamw_torch_fused")


def candidates_for(run: Run) -> list[Candidate]:
    """List every change that applies to a run, whatever it saves."""
    s = run.settings
    if s is None:
        found = [*candidates_by_category(run)]
    elif s.supervised:
        found = [candidate for make in _SUPERVISED for candidate in make(s)]
    else:
        own = (_pieces, _lean_checkpointing, _lean_generation) if s.lean else (_micro_batches, _checkpointing)
        both = (
            _precision, _adapters, _optimizer, _reference, _loss, _attention, _lengths, _sharding, _lean, _generation
        )  # fmt: skip
        found = [candidate for make in (*own, *both) for candidate in make(s)]
    return [*candidates_by_findings(run), *found, *fragmentation_candidates(run)]


def _micro_batches(s: TrainerSettings) -> Iterator[Candidate]:
    size = s.per_device_train_batch_size
    half = next((size // d for d in (2, 3, 5, 7) if size % d == 0), None)
    for smaller in dict.fromkeys(n for n in (half, 1) if n is not None and n < size):
        times = size // smaller
        changes = {
            "per_device_train_batch_size": smaller,
            "gradient_accumulation_steps": s.gradient_accumulation_steps * times,
            **({} if s.supervised else {"steps_per_generation": s.generation_steps * times}),
        }
        row = {"sft": "row", "dpo": "pair"}.get(s.trainer, "completion")
        packed = " With packing=True short rows share one, and a pass stays full." if s.trainer == "sft" else ""
        yield Candidate(
            id=f"micro_batch_{smaller}",
            action=f"Train {smaller} {row}{'s' if smaller > 1 else ''} at a time instead of {size}",
            costs=f"The same tokens in {times} times as many passes: slower only where a pass no longer fills the GPU, "
            f"as with short sequences.{packed}",
            exact=True,
            toll=Toll.SLOWER,
            changes=changes,
            effect=effects.smaller_micro_batch(smaller / size),
        )


def _checkpointing(s: Settings) -> Iterator[Candidate]:
    now = s.checkpointing
    if now == "none":
        yield _checkpoint("", True, generates=not s.supervised)
        yield Candidate(
            id="selective_checkpointing",
            action="Checkpoint all but the attentions' outputs",
            setting="gradient_checkpointing=True; trl.models.enable_selective_activation_checkpointing(model)",
            costs="As checkpointing, but attention runs once: less extra time, which counts for long sequences.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"gradient_checkpointing": "selective"},
            effect=effects.checkpointed,
        )
    if now not in ("auto", "offloaded") and s.device != "cpu":
        setting = "gradient_checkpointing=True, activation_offloading=True" if s.supervised else _OFFLOAD
        if now == "none":
            more = " Every layer's forward runs once more besides."
            yield _offload(setting, _checkpointed_and_offloaded, more_costs=more)
        else:
            yield _offload(setting, effects.offloaded_boundaries)


def _checkpoint(more: str, kind: bool | str, *, generates: bool = True) -> Candidate:
    """Turn checkpointing on; ``more`` is pasted too, ``kind`` is simulated."""
    return Candidate(
        id="checkpointing",
        action="Turn gradient checkpointing on",
        setting=written({"gradient_checkpointing": True}) + more,
        costs="Every layer's forward runs once more in backward: 20 to 30 % longer training passes"
        + (", generation as before." if generates else "."),
        exact=True,
        toll=Toll.SLOWER,
        changes={"gradient_checkpointing": kind},
        effect=effects.checkpointed,
    )


def _offload(setting: str, effect: Effect | None = None, *, more_costs: str = "") -> Candidate:
    """Keep the checkpoints on the host."""
    return Candidate(
        id="offloaded_checkpoints",
        action="Keep each layer's input in pinned host memory until backward needs it",
        setting=setting,
        costs="Copies each layer's input to the host and back: little beside long sequences' work, much beside "
        "short ones'; host memory is taken in powers of two." + more_costs,
        exact=True,
        toll=Toll.NEEDS,
        changes={"gradient_checkpointing": "offloaded"},
        effect=effect,
    )


def _checkpointed_and_offloaded(run: Run, peak: Peak) -> Mapping[str, int]:
    saved = dict(effects.checkpointed(run, peak))
    for name, n in effects.offloaded_boundaries(run, peak).items():
        saved[name] = saved.get(name, 0) + n
    return saved


def _precision(s: Settings) -> Iterator[Candidate]:
    if s.dtype != "float32" or s.device == "cpu":
        return
    frozen = s.lora_r is not None
    yield Candidate(
        id="bf16_weights",
        action="Load the weights in bfloat16" + (" (they are frozen)" if frozen else ""),
        costs="Not slower. " + ("The base is rounded once, when it is loaded; the adapter stays in float32." if frozen
        else "Weights, gradients and moments are rounded to 8 bits of mantissa: updates much smaller than a weight "
        "are lost, so that small learning rates train less."),
        exact=False,
        toll=Toll.ROUNDED,
        changes={"dtype": "bfloat16"},
        effect=effects.half_precision,
    )  # fmt: skip


def _adapters(s: Settings) -> Iterator[Candidate]:
    if s.lora_r is None:
        also = "; the adapter switched off is the reference model" if s.beta or s.trainer == "dpo" else ""
        adapter = an_adapter()
        yield replace(
            adapter,
            action=adapter.action + also,
            changes={"lora_r": RANK, "lora_target_modules": ("all-linear",)},
        )
    if s.load_in_4bit or s.device == "cpu":
        return
    setting = f'model_init_kwargs={{"quantization_config": {NF4}}}'
    yield Candidate(
        id="qlora",
        action="Keep the frozen weights in 4 bits (QLoRA)" + ("" if s.lora_r else f", with an adapter of rank {RANK}"),
        setting=setting + ("" if s.lora_r else f", {adapter_text(RANK)}"),
        costs="Each layer is unpacked whenever it is used: slower in training"
        + ("" if s.supervised else " and more so in generation")
        + ". The frozen weights are rounded to 16 values.",
        exact=False,
        toll=Toll.TRAINED,
        changes={"lora_r": s.lora_r or RANK, "load_in_4bit": True, "dtype": "bfloat16"},
        effect=effects.low_rank(s.lora_r or RANK, nf4=True),
    )


def _optimizer(s: Settings) -> Iterator[Candidate]:
    if s.optim == "adamw_torch":
        yield Candidate(
            id="fused_adamw",
            action="Use torch's fused AdamW",
            costs="Faster: one kernel instead of many, without scratch for every parameter at once.",
            exact=True,
            toll=Toll.NOTHING,
            changes={"optim": "adamw_torch_fused"},
            effect=effects.fused,
        )
    if s.optim not in _ADAMS or s.device == "cpu" or s.sharding == "fsdp2":
        return
    for name in ("adamw_8bit", "paged_adamw_8bit"):
        row = optimizer(name)
        where = ", in memory that moves to the host under pressure" if row.paged else ""
        yield Candidate(
            id=name,
            action=f"Keep Adam's two moments in 8 bits{where}",
            setting=f"{written({'optim': name})}  # pip install {row.package}",
            costs=f"Gradients stay, updates are coarser. {_EIGHT_BITS[row.paged]}",
            exact=False,
            toll=Toll.ROUNDED,
            changes={"optim": name},
            effect=effects.coarser_state(name),
        )


def _reference(s: Settings) -> Iterator[Candidate]:
    if s.beta and s.lora_r is None:
        yield Candidate(
            id="no_reference",
            action="Leave the KL term, and with it the reference model, out",
            costs="One forward less in each step. Another objective: nothing holds the policy near where it began.",
            exact=False,
            toll=Toll.OBJECTIVE,
            changes={"beta": 0.0},
            effect=effects.all_of("reference_model"),
        )


def _loss(s: TrainerSettings) -> Iterator[Candidate]:
    if s.recipe in ("trl-full-logits", "trl-0.14"):
        yield Candidate(
            id="tiled_loss",
            action="Compute log-probs in tiles of the vocabulary, as TRL does since 1.16",
            setting="pip install 'trl>=1.16'",
            costs="The head's product is computed again in backward: 1 to 4 % more work.",
            exact=True,
            toll=Toll.NOTHING,
            changes={"recipe": "trl"},
            effect=effects.tiled_logits,
        )


def _attention(s: Settings) -> Iterator[Candidate]:
    if s.device == "cpu":
        return
    if s.attn == "math":
        yield Candidate(
            id="sdpa",
            action="Use an attention kernel that does not write the scores down",
            costs="Faster.",
            exact=True,
            toll=Toll.NOTHING,
            changes={"attn": "auto"},
            effect=effects.without_masks,
        )
    elif s.attn == "auto" and s.padding == "worst":
        yield Candidate(
            id="flash_attention",
            action="Use FlashAttention, which takes padded batches without a [batch, 1, tokens, tokens] mask",
            setting=f"{written({'attn': 'flash'})}  # pip install flash-attn",
            costs="Faster; needs the package and a card of the Ampere generation or later.",
            exact=True,
            toll=Toll.NEEDS,
            changes={"padding": "none"},
            effect=effects.without_masks,
        )


def _lengths(s: TrainerSettings) -> Iterator[Candidate]:
    if s.completion_length >= 16:
        shorter = s.completion_length // 2
        share = (s.prompt_length + shorter) / s.sequence_length
        yield Candidate(
            id="shorter_completions",
            action=f"Cut completions at {shorter} tokens instead of {s.completion_length}",
            costs="Faster. Other data: longer answers are cut off and earn what a cut answer earns.",
            exact=False,
            toll=Toll.OBJECTIVE,
            changes={"completion_length": shorter},
            effect=effects.fewer_tokens(share, shorter / s.completion_length),
        )
    if s.prompt_length > 2 * s.completion_length:
        shorter = s.prompt_length // 2
        share = (shorter + s.completion_length) / s.sequence_length
        yield Candidate(
            id="shorter_prompts",
            action=f"Train on prompts of at most {shorter} tokens instead of {s.prompt_length}",
            setting=f"dataset = dataset.filter(lambda row: len(tokenizer(row['prompt']).input_ids) <= {shorter})",
            costs="Faster. Other data: longer prompts are left out.",
            exact=False,
            toll=Toll.OBJECTIVE,
            changes={"prompt_length": shorter},
            effect=effects.fewer_tokens(share, 1.0),
        )


def _sharding(s: Settings) -> Iterator[Candidate]:
    if s.gpus > 1 and s.sharding == "ddp" and s.lora_r is None and s.device != "cpu":
        yield Candidate(
            id="fsdp2",
            action=f"Divide weights, gradients and moments among the {s.gpus} GPUs",
            setting="accelerate launch --use_fsdp --fsdp_version 2 train.py",
            costs="Weights are gathered layer by layer in every pass: slower where the GPUs' link is slow.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"sharding": "fsdp2"},
            effect=effects.divided(s.gpus),
        )


def _lean(s: Settings) -> Iterator[Candidate]:
    if not s.lean and s.device != "cpu":
        yield Candidate(
            id="lean",
            action=f"Train with memprof's Lean{s.trainer.upper()}Trainer",
            setting=f"from memprof.grpo import Lean{s.trainer.upper()}Trainer as {s.trainer.upper()}Trainer",
            costs="The same loss, computed in smaller pieces; see docs on the lean trainer for its speed.",
            exact=True,
            toll=Toll.NEEDS,
            changes={"recipe": "lean"},
        )


# -- the lean trainer: what takes the place of smaller micro-batches and of transformers' checkpointing ----------------


def _pieces(s: TrainerSettings) -> Iterator[Candidate]:
    # Unless it is set, the trainer puts as many tokens together as are small beside the weights.
    together = min((s.max_tokens_per_piece or 0) // s.sequence_length, s.per_device_train_batch_size)
    if together > 1:
        yield Candidate(
            id="smaller_pieces",
            action=f"Let sequences go through the model one by one instead of {together} at a time",
            costs="The same tokens in more passes: slower where a pass no longer fills the GPU.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"max_tokens_per_piece": s.sequence_length},
            effect=effects.smaller_micro_batch(1 / together),
        )


def _lean_checkpointing(s: Settings) -> Iterator[Candidate]:
    if s.checkpointing == "none":
        yield _checkpoint(', checkpointing="auto"', "auto")
    if s.checkpointing in ("full", "selective") and s.device != "cpu":
        yield _offload('checkpointing="offloaded"')


def _lean_generation(s: Settings) -> Iterator[Candidate]:
    if s.generation != "hf":
        return
    count = s.per_device_train_batch_size * s.generation_steps
    together = min(s.generation_batch or count, count)
    if together > 1:
        half = -(-together // 2)
        yield Candidate(
            id="generated_together",
            action=f"Generate {half} sequence{'s' if half > 1 else ''} together instead of {together}",
            costs="Slower generation: a decode step reads all weights for fewer tokens. Sampling draws in another "
            "order.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"generation_batch": half},
            effect=effects.generated_together(half / together),
        )


# -- generation --------------------------------------------------------------------------------------------------------


def _generation(s: Settings) -> Iterator[Candidate]:
    """List changes to how completions are generated, by what generates now: transformers, or vLLM in the process."""
    if s.generation == "hf":
        yield from _generation_batch(s)
        yield from _cache(s)
        if s.device != "cpu":
            yield _server()
    elif s.generation == "vllm":
        yield from _engine(s)


def _generation_batch(s: Settings) -> Iterator[Candidate]:
    steps = s.generation_steps
    if steps > s.gradient_accumulation_steps:
        fewer = s.gradient_accumulation_steps
        if (s.per_device_train_batch_size * s.gpus * fewer) % s.num_generations == 0:
            yield Candidate(
                id="generation_batch",
                action=f"Generate for {fewer} micro-batch{'es' if fewer > 1 else ''} at a time instead of {steps}",
                costs="Generates more often, in smaller batches: slower. Each completion is trained on while it is "
                "newer.",
                exact=False,
                toll=Toll.SLOWER,
                changes={"steps_per_generation": fewer},
                effect=effects.generated_less(fewer / steps),
            )
    half = s.num_generations // 2
    batch = s.per_device_train_batch_size
    if half >= 2 and batch % 2 == 0 and (batch // 2 * s.gpus * steps) % half == 0:
        changes = {"num_generations": half, "per_device_train_batch_size": batch // 2}
        yield Candidate(
            id="fewer_generations",
            action=f"Compare {half} completions of a prompt instead of {s.num_generations}",
            costs="Faster. Another estimate of the advantage, from half as many completions.",
            exact=False,
            toll=Toll.OBJECTIVE,
            changes=changes,
            effect=effects.fewer_tokens(0.5, 0.5),
        )


def _cache(s: Settings) -> Iterator[Candidate]:
    if s.cache_implementation != "dynamic" or s.device == "cpu":
        return
    changes = {"cache_implementation": "quantized", "cache_dtype": "int4"}
    yield Candidate(
        id="quantized_cache",
        action="Keep generation's keys and values in 4 bits",
        setting=f"{written(changes)}  # pip install optimum-quanto",
        costs="Slower generation: keys and values are packed and unpacked for each token. Completions are sampled from "
        "slightly other probabilities.",
        exact=False,
        toll=Toll.ROUNDED,
        changes=changes,
        effect=effects.quantized_cache,
    )


def _server() -> Candidate:
    return Candidate(
        id="generate_elsewhere",
        action="Let a vLLM server on another GPU generate",
        costs="Much faster generation; needs another GPU. vLLM's log-probs differ slightly from the trainer's, which "
        "TRL corrects for.",
        exact=False,
        toll=Toll.NEEDS,
        changes={"generation": "none"},
        effect=effects.generated_elsewhere,
    )


def _engine(s: GenerationSettings) -> Iterator[Candidate]:
    share = s.vllm_gpu_memory_utilization
    if not s.vllm_enable_sleep_mode:
        yield Candidate(
            id="vllm_sleep",
            action="Put vLLM to sleep while the policy trains",
            costs="Waking it copies its weights back before each generation: some seconds for large models.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"vllm_enable_sleep_mode": True},
            effect=effects.asleep,
        )
    if share > 0.2:
        less = round(share * 2 / 3, 2)
        yield Candidate(
            id="vllm_share",
            action=f"Give vLLM {less:.0%} of the card instead of {share:.0%}",
            costs="Fewer sequences are generated at a time: slower where they no longer fit its cache. It must still "
            "hold the weights.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"vllm_gpu_memory_utilization": less},
            effect=effects.smaller_engine(less / share),
        )


# -- trainers whose rows are given: nothing generates, and there is no KL term to leave out ---------------------------


def _given_reference(s: Settings) -> Iterator[Candidate]:
    if s.trainer == "dpo" and s.lora_r is None:
        yield Candidate(
            id="precomputed_reference",
            action="Compute the reference model's log-probs once, before training, and let it go",
            setting="precompute_ref_log_probs=True",
            costs="A pass over the data set before training; every step is faster by the reference's forward.",
            exact=True,
            toll=Toll.NOTHING,
            effect=effects.all_of("reference_model"),
        )


def _shorter_rows(s: TrainerSettings) -> Iterator[Candidate]:
    shorter = s.sequence_length // 2
    if shorter >= 16:
        yield Candidate(
            id="shorter_rows",
            action=f"Cut rows at {shorter} tokens instead of {s.sequence_length}",
            setting=f"max_length={shorter}",
            costs="Faster. Other data: what is behind the cut is not trained on.",
            exact=False,
            toll=Toll.OBJECTIVE,
            changes={"max_length": shorter},
            effect=effects.fewer_tokens(0.5, 0.5),
        )


_SUPERVISED = (
    _micro_batches, _checkpointing, _precision, _adapters, _optimizer, _given_reference, _attention, _shorter_rows,
    _sharding,
)  # fmt: skip


# -- the allocator -----------------------------------------------------------------------------------------------------


def fragmentation_candidates(run: Run) -> Iterator[Candidate]:
    """List changes to the allocator, where memory lies idle between blocks in use: about the device's peak."""
    sleeps = run.settings is not None and run.settings.generation == "vllm" and run.settings.vllm_enable_sleep_mode
    if run.idle_bytes <= 0 or sleeps or not is_open("expandable_segments", run):
        return
    yield Candidate(
        id="expandable_segments",
        action="Let the allocator's segments grow instead of standing side by side",
        setting=EXPANDABLE_SEGMENTS,
        costs="Not slower once the first steps have mapped what is needed." + _refused(run),
        exact=True,
        toll=Toll.NOTHING,
        changes=_allocator(run, "expandable_segments:True"),
        effect=lambda run, peak: {},
        device=True,
    )
    if run.settings is not None and "max_split_size_mb" not in run.alloc_conf:
        yield Candidate(
            id="max_split_size",
            action="Keep large blocks whole, so that small requests do not break them up",
            setting="PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512",
            costs="Large requests are served by blocks of nearly their size only: slower where sizes change between "
            "steps.",
            exact=True,
            toll=Toll.SLOWER,
            changes=_allocator(run, "max_split_size_mb:512"),
            device=True,
        )


def _refused(run: Run) -> str:
    """Say where growing segments are refused: sleeping engines map and unmap their memory themselves."""
    generates = run.settings is not None and run.settings.generation == "vllm"
    if not (run.engine or generates or run.names.framework in ("vLLM", "SGLang")):
        return ""
    return " Not beside vLLM's sleep mode or torch_memory_saver: both refuse it."


def _allocator(run: Run, more: str) -> dict[str, str]:
    """Add one setting for the allocator; nothing where the run cannot be simulated."""
    if run.settings is None:
        return {}
    return {"alloc_conf": ",".join(part for part in (run.alloc_conf, more) if part)}
