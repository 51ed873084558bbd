"""Changes that need no configuration to be thought of: from the categories alone, and to the allocator's settings."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.advice import effects
from memprof.advice.recorded_run import Candidate, Run, Toll

__all__ = ["candidates_by_category", "fragmentation_candidates"]

_RANK = 16


def fragmentation_candidates(run: Run) -> Iterator[Candidate]:
    """Only where memory lies idle between blocks in use: about the device's peak, not the program's."""
    if run.idle_bytes <= 0 or "expandable_segments:true" in run.alloc_conf.lower():
        return
    yield Candidate(
        id="expandable_segments",
        action="Let the allocator's segments grow instead of standing side by side",
        setting="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        costs="Not slower once the first steps have mapped what is needed.",
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
            effect=None,
            device=True,
        )


def _allocator(run: Run, more: str) -> dict[str, str]:
    """One setting more for the allocator; nothing where the run cannot be simulated."""
    if run.settings is None:
        return {}
    return {"alloc_conf": ",".join(part for part in (run.alloc_conf, more) if part)}


def candidates_by_category(run: Run) -> Iterator[Candidate]:
    """From the categories alone, where the file does not say how the run was configured."""
    peak, trained = run.peak, run.own_peaks.get("gradients", 0)
    kept = run.details.get("activations", {})
    training = trained > 0 or kept.get("saved", 0) > 0.5 * peak.of("activations")
    if training and (peak.of("activations") or peak.of("loss_logits")):
        yield Candidate(
            id="micro_batch_half",
            action="Train half as many sequences at a time",
            setting="per_device_train_batch_size halved, gradient_accumulation_steps doubled",
            costs="The same tokens in twice as many passes: slower only where a pass no longer fills the GPU.",
            exact=True,
            toll=Toll.SLOWER,
            effect=effects.smaller_micro_batch(0.5),
        )
    if training and not kept.get("boundary", 0) and peak.of("activations"):
        yield Candidate(
            id="checkpointing",
            action="Turn gradient checkpointing on",
            setting="gradient_checkpointing=True",
            costs="Every layer's forward runs once more in backward: 20 to 30 % longer training passes. The estimate "
            "takes a tenth of the activations to stay.",
            exact=True,
            toll=Toll.SLOWER,
            effect=effects.checkpointed,
        )
    if trained and peak.of("optimizer_state") > 1.5 * trained:
        yield Candidate(
            id="adamw_8bit",
            action="Keep Adam's two moments in 8 bits",
            setting='optim="adamw_8bit"  # pip install bitsandbytes',
            costs="Gradients stay, updates are coarser; as fast.",
            exact=False,
            toll=Toll.ROUNDED,
            effect=effects.coarser_state(False),
        )
    if trained > 0.5 * peak.of("weights") > 0 and not peak.of("adapters"):
        yield Candidate(
            id="lora",
            action=f"Train a LoRA adapter of rank {_RANK} instead of all weights",
            setting=f'peft_config=LoraConfig(r={_RANK}, lora_alpha={2 * _RANK}, target_modules="all-linear")',
            costs="Not slower. Another kind of training: fewer degrees of freedom, and a learning rate about ten times "
            "higher.",
            exact=False,
            toll=Toll.TRAINED,
            effect=effects.low_rank(_RANK),
        )
