"""Changes to how completions are generated."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.advice import effects
from memprof.advice.recorded_run import Candidate, Toll
from memprof.config.settings import Settings

__all__ = ["generation_candidates"]


def generation_candidates(s: Settings) -> Iterator[Candidate]:
    """By what generates now: transformers, or vLLM in the trainer's process."""
    if s.generation == "hf":
        yield from _batch(s)
        yield from _cache(s)
        if s.device != "cpu":
            yield _server()
    elif s.generation == "vllm":
        yield from _engine(s)


def _batch(s: Settings) -> Iterator[Candidate]:
    steps = s.generation_steps
    if steps > s.gradient_accumulation_steps:
        fewer = s.gradient_accumulation_steps
        if (s.per_device_train_batch_size * s.gpus * fewer) % s.num_generations == 0:
            yield Candidate(
                id="generation_batch",
                action=f"Generate for {fewer} micro-batch{'es' if fewer > 1 else ''} at a time instead of {steps}",
                setting=f"steps_per_generation={fewer}",
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
        yield Candidate(
            id="fewer_generations",
            action=f"Compare {half} completions of a prompt instead of {s.num_generations}",
            setting=f"num_generations={half}, per_device_train_batch_size={batch // 2}",
            costs="Faster. Another estimate of the advantage, from half as many completions.",
            exact=False,
            toll=Toll.OBJECTIVE,
            changes={"num_generations": half, "per_device_train_batch_size": batch // 2},
            effect=effects.fewer_tokens(0.5, 0.5),
        )


def _cache(s: Settings) -> Iterator[Candidate]:
    if s.cache_implementation != "dynamic" or s.device == "cpu":
        return
    config = '{"cache_config": {"backend": "quanto", "nbits": 4}}'
    yield Candidate(
        id="quantized_cache",
        action="Keep generation's keys and values in 4 bits",
        setting=f'cache_implementation="quantized", generation_kwargs={config}  # pip install optimum-quanto',
        costs="Slower generation: keys and values are packed and unpacked for each token. Completions are sampled from "
        "slightly other probabilities.",
        exact=False,
        toll=Toll.ROUNDED,
        changes={"cache_implementation": "quantized", "cache_dtype": "int4"},
        effect=effects.quantized_cache,
    )


def _server() -> Candidate:
    return Candidate(
        id="generate_elsewhere",
        action="Let a vLLM server on another GPU generate",
        setting='use_vllm=True, vllm_mode="server"',
        costs="Much faster generation; needs another GPU. vLLM's log-probs differ slightly from the trainer's, which "
        "TRL corrects for.",
        exact=False,
        toll=Toll.NEEDS,
        changes={"generation": "none"},
        effect=effects.generated_elsewhere,
    )


def _engine(s: Settings) -> Iterator[Candidate]:
    share = s.vllm_gpu_memory_utilization
    if not s.vllm_enable_sleep_mode:
        yield Candidate(
            id="vllm_sleep",
            action="Put vLLM to sleep while the policy trains",
            setting="vllm_enable_sleep_mode=True",
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
            setting=f"vllm_gpu_memory_utilization={less}",
            costs="Fewer sequences are generated at a time: slower where they no longer fit its cache. It must still "
            "hold the weights.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"vllm_gpu_memory_utilization": less},
            effect=effects.smaller_engine(less / share),
        )
