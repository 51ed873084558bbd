"""The changes worth considering for a run, by its settings: what to set, what it costs, whether gradients stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memprof.advice import effects
from memprof.advice.checkpoints import checkpoint, offload
from memprof.advice.generation import generation_candidates
from memprof.advice.lean import lean_candidates
from memprof.advice.recorded_run import Candidate, Peak, Run, Toll
from memprof.advice.unconfigured import candidates_by_category, fragmentation_candidates
from memprof.config.settings import CHOICES, OPTIMIZERS, Settings

__all__ = ["candidates_for"]

_RANK = 16
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
    """Every change that applies to a run, whatever it saves."""
    s = run.settings
    if s is None:
        return [*candidates_by_category(run), *fragmentation_candidates(run)]
    own = (lean_candidates,) if s.recipe == "lean" else (_micro_batches, _checkpointing)
    makers = (
        *own,
        _precision,
        _adapters,
        _optimizer,
        _reference,
        _loss,
        _attention,
        _lengths,
    )
    found = [candidate for make in (*makers, _sharding, _lean) for candidate in make(s)]
    return [*found, *generation_candidates(s), *fragmentation_candidates(run)]


def _micro_batches(s: Settings) -> Iterator[Candidate]:
    size = s.per_device_train_batch_size
    half = next((size // d for d in (2, 3, 5, 7) if size % d == 0), None)
    for smaller in dict.fromkeys(n for n in (half, 1) if n is not None and n < size):
        times = size // smaller
        changes = {
            "per_device_train_batch_size": smaller,
            "gradient_accumulation_steps": s.gradient_accumulation_steps * times,
            "steps_per_generation": s.generation_steps * times,
        }
        yield Candidate(
            id=f"micro_batch_{smaller}",
            action=f"Train {smaller} completion{'s' if smaller > 1 else ''} at a time instead of {size}",
            setting=", ".join(f"{name}={value}" for name, value in changes.items()),
            costs=f"The same tokens in {times} times as many passes: slower only where a pass no longer fills the GPU, "
            "as with short sequences.",
            exact=True,
            toll=Toll.SLOWER,
            changes=changes,
            effect=effects.smaller_micro_batch(smaller / size),
        )


def _checkpointing(s: Settings) -> Iterator[Candidate]:
    now = s.checkpointing
    if now == "none":
        yield checkpoint("gradient_checkpointing=True", True)
        if "selective" in CHOICES["gradient_checkpointing"]:
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
    if now not in ("auto", "offloaded") and s.device != "cpu" and "offloaded" in CHOICES["gradient_checkpointing"]:
        if now == "none":
            more = " Every layer's forward runs once more besides."
            yield offload(_OFFLOAD, _checkpointed_and_offloaded, more_costs=more)
        else:
            yield offload(_OFFLOAD, effects.offloaded_boundaries)


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
        setting='model_init_kwargs={"dtype": "bfloat16"}',
        costs="Not slower. " + ("The base is rounded once, when it is loaded; the adapter stays in float32." if frozen
        else "Weights, gradients and moments are rounded to 8 bits of mantissa: updates much smaller than a weight "
        "are lost, so that small learning rates train less."),
        exact=False,
        toll=Toll.ROUNDED,
        changes={"dtype": "bfloat16"},
        effect=effects.half_precision,
    )  # fmt: skip


def _adapters(s: Settings) -> Iterator[Candidate]:
    lora = f'peft_config=LoraConfig(r={_RANK}, lora_alpha={2 * _RANK}, target_modules="all-linear")'
    if s.lora_r is None:
        also = "; the adapter switched off is the reference model" if s.beta else ""
        yield Candidate(
            id="lora",
            action=f"Train a LoRA adapter of rank {_RANK} instead of all weights{also}",
            setting=lora,
            costs="Not slower. Another kind of training: fewer degrees of freedom, and a learning rate about ten times "
            "higher.",
            exact=False,
            toll=Toll.TRAINED,
            changes={"lora_r": _RANK, "lora_target_modules": ("all-linear",)},
            effect=effects.low_rank(_RANK),
        )
    if s.load_in_4bit or s.device == "cpu":
        return
    nf4 = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")'
    setting = f'model_init_kwargs={{"quantization_config": {nf4}}}'
    yield Candidate(
        id="qlora",
        action="Keep the frozen weights in 4 bits (QLoRA)" + ("" if s.lora_r else f", with an adapter of rank {_RANK}"),
        setting=setting + ("" if s.lora_r else f", {lora}"),
        costs="Each layer is unpacked whenever it is used: slower in training and more so in generation. The frozen "
        "weights are rounded to 16 values.",
        exact=False,
        toll=Toll.TRAINED,
        changes={"lora_r": s.lora_r or _RANK, "load_in_4bit": True, "dtype": "bfloat16"},
        effect=effects.low_rank(s.lora_r or _RANK, nf4=True),
    )


def _optimizer(s: Settings) -> Iterator[Candidate]:
    if s.optim == "adamw_torch":
        yield Candidate(
            id="fused_adamw",
            action="Use torch's fused AdamW",
            setting='optim="adamw_torch_fused"',
            costs="Faster: one kernel instead of many, without scratch for every parameter at once.",
            exact=True,
            toll=Toll.NOTHING,
            changes={"optim": "adamw_torch_fused"},
            effect=effects.fused,
        )
    if s.optim not in _ADAMS or s.device == "cpu" or s.sharding == "fsdp2":
        return
    for name, paged in (("adamw_8bit", False), ("paged_adamw_8bit", True)):
        if name not in OPTIMIZERS:
            continue
        where = ", in memory that moves to the host under pressure" if paged else ""
        yield Candidate(
            id=name,
            action=f"Keep Adam's two moments in 8 bits{where}",
            setting=f'optim="{name}"  # pip install bitsandbytes',
            costs=f"Gradients stay, updates are coarser. {_EIGHT_BITS[paged]}",
            exact=False,
            toll=Toll.ROUNDED,
            changes={"optim": name},
            effect=effects.coarser_state(paged),
        )


def _reference(s: Settings) -> Iterator[Candidate]:
    if s.beta and s.lora_r is None:
        yield Candidate(
            id="no_reference",
            action="Leave the KL term, and with it the reference model, out",
            setting="beta=0.0",
            costs="One forward less in each step. Another objective: nothing holds the policy near where it began.",
            exact=False,
            toll=Toll.OBJECTIVE,
            changes={"beta": 0.0},
            effect=effects.all_of("reference_model"),
        )


def _loss(s: Settings) -> Iterator[Candidate]:
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
            setting='model_init_kwargs={"attn_implementation": "sdpa"}',
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
            setting='model_init_kwargs={"attn_implementation": "flash_attention_2"}  # pip install flash-attn',
            costs="Faster; needs the package and a card of the Ampere generation or later.",
            exact=True,
            toll=Toll.NEEDS,
            changes={"padding": "none"},
            effect=effects.without_masks,
        )


def _lengths(s: Settings) -> Iterator[Candidate]:
    if s.completion_length >= 16:
        shorter = s.completion_length // 2
        share = (s.prompt_length + shorter) / s.sequence_length
        yield Candidate(
            id="shorter_completions",
            action=f"Cut completions at {shorter} tokens instead of {s.completion_length}",
            setting=f"max_completion_length={shorter}",
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
    if "lean" in CHOICES["recipe"] and s.recipe != "lean" and s.device != "cpu":
        yield Candidate(
            id="lean",
            action="Train with memprof's LeanGRPOTrainer",
            setting="from memprof.grpo import LeanGRPOTrainer as GRPOTrainer",
            costs="The same loss, computed in smaller pieces; see docs on the lean trainer for its speed.",
            exact=True,
            toll=Toll.NEEDS,
            changes={"recipe": "lean"},
        )
