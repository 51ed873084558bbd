"""Describe an explained out-of-memory text: ``memprof.oom/1``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from memprof.report.advice import Headline
from memprof.report.base import Count, Model

#: A size in bytes as a text gives it: a number that overflowed in the program may exceed ``Bytes``.
PrintedBytes = Annotated[int, msgspec.Meta(ge=0)]


class OtherProcess(Model, frozen=True, kw_only=True):
    """Another process on the same device.

    Attributes:
        pid: its process ID.
        bytes: its memory on the device; 0 if the message doesn't say.
    """

    pid: int
    bytes: PrintedBytes


class MessageNumber(Model, frozen=True, kw_only=True):
    """A figure of the message.

    Attributes:
        name: what it is called.
        bytes: its value.
        meaning: what it means.
    """

    name: str
    bytes: PrintedBytes
    meaning: str


class Suggestion(Model, frozen=True, kw_only=True):
    """Something to try.

    Attributes:
        action: what to do.
        why: why it helps.
    """

    action: str
    why: str


class TextFact(Model, frozen=True, kw_only=True):
    """A fact that was read from the text.

    Attributes:
        name: its name in ``facts.toml`` or ``derived.py``.
        says: what it means.
        value: its value, ``yes`` for a fact that only holds.
        line: the line that shows it.
    """

    name: str
    says: str
    value: str
    line: Count | None


class UnreadFigure(Model, frozen=True, kw_only=True):
    """A size next to the message that no part of the answer uses.

    Attributes:
        text: the figure as printed.
        line: its line.
        label: the words next to it that name it; empty if there are none.
        bytes: its value.
    """

    text: str
    line: Count
    label: str
    bytes: PrintedBytes


class FailedRank(Model, frozen=True, kw_only=True):
    """What one rank's message says about a failure that several ranks have; fields as in the failure."""

    rank: Count | None
    actor: str | None
    device: Count | None
    line: Count
    requested_bytes: PrintedBytes | None
    device_free_bytes: PrintedBytes | None
    allocated_bytes: PrintedBytes | None
    cached_bytes: PrintedBytes | None
    missing_bytes: PrintedBytes | None


class ExplainedFailure(Model, frozen=True, kw_only=True):
    """One failure: several ranks that fail alike are one, with the first rank's figures.

    Attributes:
        kind: ``device`` (PyTorch's own message), ``driver``, ``library``, ``cpu``, ``host``, ``killed`` or ``engine``.
        form: ID of the message.
        program: the program that printed the message.
        framework: the framework of the run, if the text shows it.
        backend: ``CUDA``, ``HIP``, ``MPS``, ...; empty if the message isn't about one.
        message: the message itself.
        rank: the rank that failed.
        actor: Ray's or the engine's name for the process.
        device: index of the device.
        line: line of the message in the text.
        requested_bytes: the size that could not be allocated.
        device_free_bytes: free memory of the device.
        allocated_bytes: in live tensors.
        cached_bytes: reserved by PyTorch but unallocated.
        missing_bytes: how much more would have had to be free.
        device_total_bytes: memory of the device.
        allowed_bytes: limit of the process.
        in_use_bytes: memory of the process on the device.
        private_pools_bytes: part of ``allocated_bytes`` in private pools.
        reserved_bytes: reserved by PyTorch.
        outside_torch_bytes: non-PyTorch memory of the process.
        other_processes_bytes: memory of the other processes that the message names.
        unexplained_bytes: unaccounted memory of the device.
        processes: the other processes that the message names.
        facts: other values of the message and of the lines around it, by name; sizes in bytes.
        sum: the memory in use as a sum, in a sentence.
        contradictions: figures that cannot be right, each a sentence.
        cause: ``full``, ``fragmentation``, ``other_processes``, ``unexplained``, ``outside_torch``,
            ``larger_than_device``, ``limit``, ``refused``, ``unknown``, or the kind.
        reason: a more specific ID of the cause.
        because: the cause in a sentence.
        phase: phase of the run, by the traceback.
        logits: whether the tensor is as wide as the vocabulary.
        frame: the innermost frame outside installed libraries.
        numbers: the figures of the message with their meaning.
        suggestions: what to try, best first.
        unread: sizes in and next to the message that the answer does not use, the nearest eight.
        evidence: every fact that was read, with ``--explain-facts``.
        ranks: each rank that failed.
        headline: the answer in sentences; ``places`` and ``assumed`` are empty.
    """

    kind: str
    form: str
    program: str
    framework: str | None
    backend: str
    message: str
    rank: Count | None
    actor: str | None
    device: Count | None
    line: Count
    requested_bytes: PrintedBytes | None
    device_free_bytes: PrintedBytes | None
    allocated_bytes: PrintedBytes | None
    cached_bytes: PrintedBytes | None
    missing_bytes: PrintedBytes | None
    device_total_bytes: PrintedBytes | None
    allowed_bytes: PrintedBytes | None
    in_use_bytes: PrintedBytes | None
    private_pools_bytes: PrintedBytes | None
    reserved_bytes: PrintedBytes | None
    outside_torch_bytes: PrintedBytes | None
    other_processes_bytes: PrintedBytes | None
    unexplained_bytes: PrintedBytes | None
    processes: tuple[OtherProcess, ...]
    facts: Mapping[str, int | float | str]
    sum: str | None
    contradictions: tuple[str, ...]
    cause: str
    reason: str
    because: str
    phase: str | None
    logits: bool
    frame: str | None
    numbers: tuple[MessageNumber, ...]
    suggestions: tuple[Suggestion, ...] = msgspec.field(name="try")
    unread: tuple[UnreadFigure, ...]
    evidence: tuple[TextFact, ...]
    ranks: tuple[FailedRank, ...]
    headline: Headline


class EngineMemory(Model, frozen=True, kw_only=True):
    """The memory of an inference engine on one rank's GPU, by the engine's own log lines; the largest of each.

    Attributes:
        engine: vLLM or SGLang.
        line: the first of these lines.
        weights_bytes: weights.
        kv_cache_bytes: KV cache.
        graphs_bytes: CUDA graphs.
        activations_bytes: activations at the profiled peak.
        outside_bytes: non-PyTorch memory.
    """

    engine: str
    line: Count
    weights_bytes: PrintedBytes | None = None
    kv_cache_bytes: PrintedBytes | None = None
    graphs_bytes: PrintedBytes | None = None
    activations_bytes: PrintedBytes | None = None
    outside_bytes: PrintedBytes | None = None


class ExplainedText(Model, tag_field="schema", tag="memprof.oom/1", frozen=True, kw_only=True):
    """An explained out-of-memory text (``memprof oom``): ``memprof.oom/1``.

    Attributes:
        failures: every failure of the text, in order.
        engines: the memory of the inference engines that the text shows.
        notes: sentences about several failures or about the whole text.
    """

    failures: tuple[ExplainedFailure, ...]
    engines: tuple[EngineMemory, ...]
    notes: tuple[str, ...]
