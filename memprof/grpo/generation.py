"""Generate within what memory has room for: all together, in a rolling batch over a pool, or in passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memprof.compat.patching import replacing
from memprof.compat.peft import CONFIGS
from memprof.config.model_shape import ModelShape
from memprof.grpo import device as machine
from memprof.grpo.paged.schedule import CHUNK, GenerationCounts, PoolSize
from memprof.grpo.paged.support import NotPaged, why_not
from memprof.grpo.paged.transformers_loop import decode_in_pool
from memprof.grpo.step.context import StepContext
from memprof.grpo.step.random_state import RandomState
from memprof.grpo.support import prompt_learning
from memprof.units import format_gib

#: The entry of the trainer's state, and so of its checkpoints, that holds how a run generates.
KEPT = "LeanGeneration"

#: Share of the memory that is free which generation plans with: the rest is for fragmentation and activations.
_SHARE = 0.85
# Copies of one position's logits alive in a decode step: the model's, fp32's, sorted ones and probabilities.
_LOGITS_COPIES = 6
# Tensors of a layer alive at its highest while a prompt goes through it: of the model's width, and of the MLP's inner
# one, without adapters and with (whose own are fp32 beside a bf16 model).
_WIDE, _INNER = (8, 13), (3, 6)


def cache_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Return the bytes of one sequence's keys and values, ``2 * layers * kv_heads * head_dim * tokens * itemsize`` but
    for windows, and of states of fixed size."""
    shape = ModelShape.of(config)
    return shape.kv_cache_bytes(tokens, itemsize) + shape.state_bytes(itemsize)


def decode_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Return the bytes of one more sequence while it decodes: its cache, its largest layer twice (transformers' cache
    grows by concatenation), one layer's keys and values where the cache has what they are made from, and its logits."""
    shape = ModelShape.of(config)
    growing = shape.largest_kv_cache_bytes(tokens, itemsize)
    made = _made_bytes(shape, tokens, itemsize) if shape.latent else 0
    return cache_bytes(config, tokens, itemsize) + growing + made + _logits_bytes(shape)


def _made_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Count one layer's keys and values of one sequence, of all query heads."""
    return tokens * shape.heads * (shape.head_dim + shape.value_dim) * itemsize


def _logits_bytes(shape: ModelShape) -> int:
    return _LOGITS_COPIES * 4 * shape.vocabulary


def prompt_bytes(config: Any, tokens: int, itemsize: int, *, adapters: bool, tile: int | None) -> tuple[int, int]:
    """Return the bytes of a prompt while it goes through the model, its cache and one layer's tensors: what each
    sequence adds, and what all share (with the MLP in tiles of ``tile`` tokens, one tile's)."""
    shape = ModelShape.of(config)
    network = _INNER[adapters] * shape.intermediate * itemsize
    each = cache_bytes(config, tokens, itemsize) + tokens * _WIDE[adapters] * shape.hidden * itemsize
    return (each + tokens * network, 0) if tile is None else (each, tile * network)


def _evenly(count: int, most: int) -> int:
    """Split ``count`` sequences into the fewest passes of at most ``most``, as equal as can be; return one's size."""
    return math.ceil(count / math.ceil(count / most))


def _most_together(step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> int:
    """Return ``generation_batch`` where it is given; else, on CUDA, how many fit into what is free now, or all."""
    count = max(1, len(prompt_ids))
    if step.settings.generation_batch is not None:
        return min(count, int(step.settings.generation_batch))
    device = step.accelerator.device
    if machine.device_kind(device) != "cuda" or step.settings.cache_implementation == "offloaded":
        return count
    prompt = max(map(len, prompt_ids), default=0)
    model = step.base_model()
    size = model.dtype.itemsize
    adapters = CONFIGS.of(step.policy) is not None
    prefill, shared = prompt_bytes(model.config, prompt, size, adapters=adapters, tile=step.tile)
    decode = decode_bytes(model.config, prompt + step.completion_length, size)
    room = int(_SHARE * machine.free_bytes(device))
    return max(1, min(count, room // decode, (room - shared) // prefill))


def pool_size(step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> PoolSize:
    """Choose the pool of a rolling batch, with what a forward gathers of one layer: ``generation_batch`` sequences of
    full length, else what is free on CUDA, else room for all."""
    longest = max(map(len, prompt_ids)) + step.completion_length
    whole = len(prompt_ids) * longest
    demand = _demand(step, prompt_ids)
    layers = ModelShape.of(step.base_model().config).caching_layers
    cap = _pool_cap(step, prompt_ids, longest)
    if cap is None or demand + whole / layers <= cap:
        return PoolSize(demand, whole)
    # What is gathered has every row's prompt, and rows as long as the longest of them; at most a quarter of the cap.
    prompts = sum(map(len, prompt_ids))
    own = max(0, cap - sum(map(len, set(map(tuple, prompt_ids)))))
    gathered = min(whole, prompts + 3 * own // 2, cap * layers // 4)
    return PoolSize(max(longest, min(demand, cap - math.ceil(gathered / layers))), gathered)


def _pool_cap(step: StepContext, prompt_ids: Sequence[Sequence[int]], longest: int) -> int | None:
    """Count the tokens a generation may hold; None: as many as it likes."""
    if step.settings.generation_batch is not None:
        return int(step.settings.generation_batch) * longest
    device = step.accelerator.device
    if machine.device_kind(device) != "cuda":
        return None
    model = step.base_model()
    shape, size = ModelShape.of(model.config), int(model.dtype.itemsize)
    adapters = CONFIGS.of(step.policy) is not None
    chunk, shared = prompt_bytes(model.config, min(CHUNK, longest), size, adapters=adapters, tile=step.tile)
    mask = longest * min(CHUNK, longest) * (1 + size)
    made = _made_bytes(shape, longest, size) * (len(prompt_ids) if shape.latent else 1)
    others = chunk + shared + mask + made + len(prompt_ids) * _logits_bytes(shape)
    room = int(_SHARE * machine.free_bytes(device)) - others
    return max(0, room) // shape.kv_cache_bytes(1, size)


class PassSize:
    """Hold how many sequences a run's passes of ``generate`` have, once free memory has limited them.

    The size is kept, so that a seed draws the same completions however memory comes and goes.
    """

    def __init__(self) -> None:
        self.kept: int | None = None  #: The most sequences together that memory has allowed; None: it has not limited.

    def of(self, step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> int:
        """Return the size for these prompts, equal on all ranks, and log the passes it takes."""
        count = max(1, len(prompt_ids))
        most = step.ranks.least(_most_together(step, prompt_ids))
        if step.settings.generation_batch is None:
            most = self._keep(step, count, most)
        size = _evenly(count, most)
        passes = math.ceil(count / size)
        if passes > 1:
            step.log.say(
                f"{count} sequences generate in {passes} passes of at most {size}: about {passes} times the decode "
                "steps of one pass over all"
            )
        return size

    def _keep(self, step: StepContext, count: int, most: int) -> int:
        if most < min(count, self.kept or count):
            if self.kept is not None:
                step.log.warn(f"the free memory fits {most} sequences in generation now, {self.kept} before")
            self.kept = most
        return min(most, self.kept or most)


class Generation:
    """Generate a run's completions, and keep how, so that a seed draws the same ones after a resume.

    ``rolling``: whether a rolling batch is generating now.
    """

    def __init__(self) -> None:
        self.rolling = False
        self._passes = PassSize()
        self._pool: PoolSize | None = None

    def run(
        self,
        step: StepContext,
        prompt_ids: Sequence[Sequence[int]],
        generate: Callable[[Sequence[Sequence[int]]], Any],
        kept: dict[str, Any],
    ) -> Any:
        """Return what ``generate``, TRL's own, returns for all prompts: completions' ids, and None.

        ``kept`` goes into checkpoints; its entry :data:`KEPT` is read and written.
        """
        if prompt_learning(step.policy) and len({len(ids) for ids in prompt_ids}) > 1:
            step.log.warn("all sequences generate together: PEFT's prompt learning counts positions from their padding")
            return generate(prompt_ids)
        self._recall(kept.get(KEPT) or {})
        found = self._in_pool(step, prompt_ids, generate) if self._wants_pool(step, prompt_ids) else None
        if found is None:
            found = self._in_passes(step, prompt_ids, generate)
        kept[KEPT] = {"pass": self._passes.kept, "pool": self._pool and [self._pool.slots, self._pool.gathered]}
        return found

    def _recall(self, kept: dict[str, Any]) -> None:
        if self._passes.kept is None and kept.get("pass"):
            self._passes.kept = int(kept["pass"])
        if self._pool is None and kept.get("pool"):
            self._pool = PoolSize(*map(int, kept["pool"]))

    def _wants_pool(self, step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> bool:
        wanted = step.settings.generation
        if wanted is not None:
            return bool(wanted == "paged")
        if step.ranks.forward_together:  # ranks decide alike: in passes
            return False
        return self._pool is not None or _most_together(step, prompt_ids) < len(prompt_ids)

    def _in_pool(self, step: StepContext, prompt_ids: Sequence[Sequence[int]], generate: Callable[..., Any]) -> Any:
        """Generate in a rolling batch; where the model or the settings rule it out, log why and return None."""
        model = step.base_model()
        longest = max(map(len, prompt_ids)) + step.completion_length
        together = step.ranks.forward_together
        reason = step.adapter_outside or why_not(model, step.settings, longest, together=together)
        if reason is None:
            size, work = self._size(step, prompt_ids), GenerationCounts()
            policy = step.accelerator.unwrap_model(step.policy)
            free = step.adaptation.clear if step.adaptation else None
            decode = partial(decode_in_pool, size=size, work=work, free=free)
            self.rolling = True
            try:
                with replacing((policy, "generate", partial(policy.generate, custom_generate=decode))):
                    found = generate(prompt_ids)
            except NotPaged as error:
                reason = str(error)
            else:
                self._note_shrunk(step, work)
                _tell(step, len(prompt_ids), size, work)
                return found
            finally:
                self.rolling = False
        tell = step.log.warn if step.settings.generation == "paged" else step.log.say
        tell(f"no rolling batch, so that sequences generate in passes: {reason}")
        return None

    def _note_shrunk(self, step: StepContext, work: GenerationCounts) -> None:
        if work.shrunk is not None:
            self._pool = work.shrunk
            step.log.warn(
                f"out of memory in a rolling batch: it continued with a pool of {work.shrunk.slots} tokens, which is "
                "kept (generation_batch spares the failed attempt)"
            )

    def _size(self, step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> PoolSize:
        """Return the pool that is kept; on a GPU without room for it, warn and return a smaller one."""
        now = pool_size(step, prompt_ids)
        if self._pool is None:
            self._pool = now
        limited = step.settings.generation_batch is None and machine.device_kind(step.accelerator.device) == "cuda"
        if limited and now.slots < min(self._pool.slots, _demand(step, prompt_ids)):
            step.log.warn(f"the free memory fits {now.slots} tokens in generation now, {self._pool.slots}")
            self._pool = now
        return self._pool if limited else now

    def _in_passes(self, step: StepContext, prompt_ids: Sequence[Sequence[int]], generate: Callable[..., Any]) -> Any:
        size = self._passes.of(step, prompt_ids)
        again = False
        while step.adaptation is not None:
            state = RandomState.now(step.accelerator.device)
            try:
                return _passes(prompt_ids, size, generate)
            except torch.OutOfMemoryError as error:
                said = str(error)  # and nothing else of it: its frames hold what was generated
            step.adaptation.clear()
            state.restore()
            if again and size == 1:
                raise torch.OutOfMemoryError(f"{said}\nThe lean trainer can't generate even one sequence.")
            if again:
                self._passes.kept = size = math.ceil(size / 2)
                step.log.warn(f"out of memory in generation: passes have {size} sequences from here on: other draws")
            again = True
        return _passes(prompt_ids, size, generate)


def _passes(prompt_ids: Sequence[Sequence[int]], size: int, generate: Callable[..., Any]) -> Any:
    if size >= len(prompt_ids):
        return generate(prompt_ids)
    parts = [generate(prompt_ids[start : start + size]) for start in range(0, len(prompt_ids), size)]
    return [ids for part, _ in parts for ids in part], None


def _demand(step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> int:
    """Count the tokens of all sequences at full length, equal prompts once."""
    return sum(map(len, set(map(tuple, prompt_ids)))) + len(prompt_ids) * step.completion_length


def _tell(step: StepContext, count: int, size: PoolSize, work: GenerationCounts) -> None:
    """Log what a generation held and ran, for the first of a run."""
    if any(line.startswith(_ROLLING) for line in step.log.said):
        return
    step.log.say(rolling_words(step.base_model(), count, size, work))


def rolling_words(model: Any, count: int, size: PoolSize, work: GenerationCounts) -> str:
    """Say what a rolling batch of ``count`` sequences held and ran."""
    token = cache_bytes(model.config, 1, model.dtype.itemsize)
    return (
        f"{_ROLLING} over a pool of {size.slots} tokens ({format_gib(size.slots * token)} GiB): {count} sequences took "
        f"{work.steps} decode steps of {work.rows / max(1, work.steps):.1f} on average, and computed {work.again} "
        "tokens again"
    )


_ROLLING = "sequences generate in a rolling batch"
