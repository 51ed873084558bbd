"""What the demo's bytes must be, computed from the checkpoint and the run's lengths and not from memprof.

The tests hold the tiny model to these and ``benchmarks/recording/check_demo.py`` the real one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.demo.training import Scale, lora_config
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis

# The share of the peak that no evidence may be left for.
UNATTRIBUTED = 0.005

# Columns of the vocabulary TRL takes at a time (``trl/kernels/chunked_logprob.py``).
TILE = 32768

# Functions of TRL that compute the loss or the log-probabilities it is made of.
LOSS_FUNCTIONS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")
OUTSIDE_GENERATION = (Phase.FORWARD, Phase.BACKWARD, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS)


@dataclass(frozen=True)
class Facts:
    """A run's model and lengths. ``policy_bytes`` counts each storage of a parameter or buffer once."""

    policy_bytes: int
    adapter_bytes: int
    trainable_bytes: int
    trainable_tensors: int
    layers: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    element_size: int
    sequences: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def optimizer_bytes(self) -> int:
        """AdamW: two moments a parameter, and a float32 step counter for each tensor."""
        return 2 * self.trainable_bytes + 4 * self.trainable_tensors

    @property
    def kv_cache_bytes(self) -> int:
        """All keys and values when the last token is decoded, and the one old K or V being copied from.

        The last token is sampled and never fed back, so the cache ends one short. The old tensor that
        is concatenated holds one token less than the new one.
        """
        token = self.kv_heads * self.head_dim * self.sequences * self.element_size
        tokens = self.prompt_tokens + self.completion_tokens - 1
        return 2 * self.layers * tokens * token + (tokens - 1) * token


    @property
    def logits_tile_bytes(self) -> int:
        """The float32 logits of one tile: every token but the last, at most ``TILE`` of the vocabulary."""
        tokens = self.sequences * (self.prompt_tokens + self.completion_tokens - 1)
        return tokens * min(self.vocabulary, TILE) * 4


@dataclass(frozen=True)
class Check:
    """One statement about the bytes, and whether it holds."""

    what: str
    found: int
    relation: str
    expected: int

    @property
    def holds(self) -> bool:
        found, expected = self.found, self.expected
        return {"=": found == expected, "<=": found <= expected, ">=": found >= expected}[self.relation]

    def __str__(self) -> str:
        mark = "ok  " if self.holds else "FAIL"
        off = "" if self.holds or self.relation != "=" else f"   off by {self.found - self.expected:+,}"
        return f"{mark} {self.what}: {self.found:,} {self.relation} {self.expected:,}{off}"


def facts_of(checkpoint: Path, metrics: list[dict[str, float]], *, step: int, lora: bool, scale: Scale) -> Facts:
    """The facts of one recorded step: sizes from the checkpoint, lengths from what the trainer logged."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = model.config
    policy_bytes = _unique_bytes([*model.parameters(), *model.buffers()])
    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config())
    trainable = [p for p in model.parameters() if p.requires_grad]
    prompt, completion = _lengths(metrics, step, scale.completions)
    return Facts(
        policy_bytes=policy_bytes,
        adapter_bytes=_unique_bytes(trainable) if lora else 0,
        trainable_bytes=_unique_bytes(trainable),
        trainable_tensors=len(trainable),
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        element_size=trainable[0].element_size(),
        sequences=scale.completions,
        prompt_tokens=prompt,
        completion_tokens=completion,
    )


def _unique_bytes(tensors: list[Any]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def _lengths(metrics: list[dict[str, float]], step: int, sequences: int) -> tuple[int, int]:
    """Prompt and longest completion of a step, in tokens; all its sequences share one prompt."""
    seen = {int(row["step"]): row for row in metrics if "num_tokens" in row}
    before = seen[step - 1]["num_tokens"] if step > 1 else 0.0
    tokens = seen[step]["num_tokens"] - before
    prompt = tokens / sequences - seen[step]["completions/mean_length"]
    assert math.isclose(prompt, round(prompt), abs_tol=1e-3), "the sequences do not share one prompt"
    return round(prompt), round(seen[step]["completions/max_length"])


def checks(analysis: Analysis, report: dict[str, Any], facts: Facts) -> Iterator[Check]:
    """Every statement of the demo's promise, on the report's requested bytes."""
    peak = report["peak"]
    categories = peak["categories_requested"]
    yield Check("categories at the peak = active bytes", sum(peak["categories"].values()), "=", peak["active_bytes"])
    for phase in report["phases"]:
        name = f"categories at the peak of {phase['phase']} = active bytes"
        yield Check(name, sum(phase["categories"].values()), "=", phase["peak_bytes"])
    lora = bool(facts.adapter_bytes)
    yield Check("weights = the policy's storages", categories["weights"], "=", facts.policy_bytes)
    reference = 0 if lora else facts.policy_bytes
    yield Check("reference_model", categories["reference_model"], "=", reference)
    yield Check("adapters", categories["adapters"], "=", facts.adapter_bytes)
    yield from _optimizer_checks(analysis, facts)
    yield Check("own peak of kv_cache", report["own_peaks"]["kv_cache"], "=", facts.kv_cache_bytes)
    yield from _loss_checks(analysis, report, facts)
    allowed = int(peak["active_bytes"] * UNATTRIBUTED)
    yield Check("unattributed at the peak", peak["categories"]["unattributed"], "<=", allowed)


def _optimizer_checks(analysis: Analysis, facts: Facts) -> Iterator[Check]:
    found = [b for b in analysis.phases if b.phase == Phase.OPTIMIZER_STEP]
    yield Check("phases of optimizer_step", len(found), ">=", 1)
    for breakdown in found:
        sizes = breakdown.categories_requested
        where = f"at the peak of optimizer_step {breakdown.step}"
        yield Check(f"gradients {where}", sizes["gradients"], "=", facts.trainable_bytes)
        yield Check(f"optimizer_state {where}", sizes["optimizer_state"], "=", facts.optimizer_bytes)


def _loss_checks(analysis: Analysis, report: dict[str, Any], facts: Facts) -> Iterator[Check]:
    tile = facts.logits_tile_bytes
    for phase in report["phases"]:
        if phase["phase"] in (Phase.REFERENCE_LOGPROBS, Phase.FORWARD, Phase.BACKWARD):
            found = phase["categories"].get("loss_logits", 0)
            yield Check(f"loss_logits at the peak of {phase['phase']}, against one tile", found, ">=", tile)
    columns = analysis.attribution
    phases = [phase.code for phase in OUTSIDE_GENERATION]
    rows = [
        row
        for row in range(len(columns.category))
        if columns.category[row] == Category.LOSS_LOGITS.code and columns.phase[row] in phases
    ]
    yield Check("allocations of loss_logits outside generation", len(rows), ">=", 1)
    stray = [row for row in rows if not _in_loss(analysis, row)]
    yield Check("of those, with no function of the loss on their stack", len(stray), "=", 0)


def _in_loss(analysis: Analysis, row: int) -> bool:
    stack = analysis.snapshot.stacks.of(int(analysis.timeline.stack[row]))
    names = " ".join(str(frame) for frame in stack)
    # Backward runs the loss's own autograd functions; on the CPU they stand on the trainer's stack.
    return any(name in names for name in (*LOSS_FUNCTIONS, "backward"))
