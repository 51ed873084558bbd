"""Describe what fits on a GPU: ``memprof.plan/1``, and an engine in the memory left: ``memprof.serving/1``."""

from __future__ import annotations

from typing import Literal

from memprof.report.advice import Headline
from memprof.report.base import ByCategory, Bytes, Count, Model, Positive, Settings, Share, written
from memprof.report.simulation import ExpectedError
from memprof.vocabulary import Category, Phase

#: What a search enlarges; ``speed`` enlarges nothing.
Aim = Literal["context", "num_generations", "batch", "speed"]


class PlanRow(Model, frozen=True, kw_only=True):
    """One method, or one value of ``--vary``.

    Attributes:
        method: its name.
        config: all settings.
        fits: whether it fits.
        peak_bytes: allocated memory.
        device_peak_bytes: reserved plus non-PyTorch memory.
        host_bytes: host memory.
        largest_category: of the allocated peak.
        phase: of the allocated peak.
        categories: of the allocated peak.
        step_s: estimated seconds of a step; ``None`` if the GPU model is not known.
        limit_bytes: the most that ``device_peak_bytes`` may be.
        on_front: whether no other row takes less time and no more memory, or the reverse.
        largest: the largest run that fits with this method, if one was searched.
    """

    method: str
    config: Settings
    fits: bool
    peak_bytes: Bytes
    device_peak_bytes: Bytes
    host_bytes: Bytes
    largest_category: Category
    phase: Phase
    categories: ByCategory
    step_s: Positive | None = written(None)
    limit_bytes: Bytes | None = written(None)
    on_front: bool | None = None
    largest: PlanRow | None = None


class Plan(Model, tag_field="schema", tag="memprof.plan/1", frozen=True, kw_only=True):
    """A plan: ``memprof.plan/1``.

    Attributes:
        model: the model.
        gpu: the GPU.
        rows: one for each method or value of ``--vary``.
        best: the row that fits and is largest by what was maximized (``speed``: the fastest).
        fastest: the row that fits and takes least time for the same step.
        maximized: what a search maximized.
        total_bytes: memory of the GPU.
        limit_bytes: the highest of the rows' limits.
        expected_error: as in a report.
        notes: sentences.
        headline: the answer in sentences.
        code: ``best`` to paste, or ``None``.
        fastest_code: ``fastest`` to paste, or ``None``.
    """

    model: str
    gpu: str
    rows: tuple[PlanRow, ...]
    best: PlanRow | None
    fastest: PlanRow | None = written(None)
    maximized: Aim
    total_bytes: Bytes
    limit_bytes: Bytes
    expected_error: ExpectedError
    notes: tuple[str, ...]
    headline: Headline | None = None
    code: str | None = written(None)
    fastest_code: str | None = written(None)


class Serving(Model, tag_field="schema", tag="memprof.serving/1", frozen=True, kw_only=True):
    """``memprof.serving/1``: an inference engine in the memory that a trainer leaves (``--serve-beside``).

    Attributes:
        basis: always ``modelled``.
        model: the model.
        gpu: the GPU.
        total_bytes: its memory.
        trainer_bytes: used by the trainer.
        free_bytes: what the trainer leaves.
        gpu_memory_utilization: the share to set, or ``None`` if none is sufficient.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: sequences at once.
        weights_bytes: of the share: weights.
        activation_bytes: of the share: the highest activations of a profiled forward.
        outside_bytes: of the share: non-PyTorch memory.
        kv_bytes: of the share: KV cache.
        kv_bytes_per_token: KV cache of a token.
        kv_tokens: tokens in the pool.
        fits: whether all that was requested fits at once.
        notes: sentences.
    """

    basis: Literal["modelled"]
    model: str
    gpu: str
    total_bytes: Bytes
    trainer_bytes: Bytes
    free_bytes: Bytes
    gpu_memory_utilization: Share | None
    max_model_len: Count
    max_num_seqs: Count
    weights_bytes: Bytes
    activation_bytes: Bytes
    outside_bytes: Bytes
    kv_bytes: Bytes
    kv_bytes_per_token: Bytes
    kv_tokens: Count
    fits: bool
    notes: tuple[str, ...]
