"""Say whether a simulated run fits a GPU, by what the device must give and not by what the program holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from memprof.config.fits import kept_for, limit_bytes, room_bytes, words_of
from memprof.config.gpus import Gpu
from memprof.report.run import KnownSettings
from memprof.report.simulation import Ensemble, Fit, GenerationNeed, HostNeed, PhaseNeed
from memprof.simulate.ensemble import margin_kept
from memprof.simulate.recorder.host_memory import host_use
from memprof.units import format_gib, parse_size
from memprof.vocabulary import EXPANDABLE_SEGMENTS, Phase

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis


@dataclass(frozen=True)
class FitVerdict:
    """State the bytes of one run on one GPU. ``needed_bytes`` is reserved plus what is held outside torch.

    ``flushes`` says that it fits only because the allocator gives cached segments back when the card is full, which
    costs time at every step; of a run that does not fit it is False. The run fits where every variant of it in
    ``ensemble`` does; None: none was asked, since what the run holds at once is more than the card has.
    """

    gpu: str
    total_bytes: int
    needed_bytes: int
    reserved_bytes: int
    non_torch_bytes: int
    margin: float
    kept: str
    fits: bool
    flushes: bool
    phase: Phase
    phases: tuple[PhaseNeed, ...] = ()
    host: HostNeed | None = None
    ensemble: Ensemble | None = None
    generation: GenerationNeed | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "flushes", self.flushes and self.fits)

    @property
    def limit_bytes(self) -> int:
        """Return the bytes the prediction must not exceed."""
        return limit_bytes(self.total_bytes, self.margin)

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes that are left; negative where it does not fit."""
        return self.total_bytes - self.needed_bytes

    def squeezed(self, reserved_bytes: int) -> FitVerdict:
        """Return the verdict of the same run where it fits because cached segments are given back."""
        phases = tuple(
            msgspec.structs.replace(
                need, reserved_bytes=least, needed_bytes=least + self.non_torch_bytes, fits=True
            )
            for need in self.phases
            for least in [min(need.reserved_bytes, reserved_bytes)]
        )
        needed = reserved_bytes + self.non_torch_bytes
        return replace(self, needed_bytes=needed, reserved_bytes=reserved_bytes, fits=True, flushes=True, phases=phases)

    def answer(self) -> Fit:
        """Return ``fit`` of the report."""
        return Fit(
            gpu=self.gpu,
            total_bytes=self.total_bytes,
            limit_bytes=self.limit_bytes,
            needed_bytes=self.needed_bytes,
            reserved_bytes=self.reserved_bytes,
            non_torch_bytes=self.non_torch_bytes,
            headroom_bytes=self.headroom_bytes,
            margin=self.margin,
            kept=self.kept,
            fits=self.fits,
            flushes=self.flushes,
            phase=self.phase,
            phases=self.phases,
            host=self.host,
            generation=self.generation,
            ensemble=self.ensemble,
            sentence=self.sentence(),
        )

    def sentence(self) -> str:
        more = f" {_generation(self.generation)}" if self.generation is not None else ""
        return self._judgement() + more

    def _judgement(self) -> str:
        need = f"needs {format_gib(self.needed_bytes)} GiB of {format_gib(self.total_bytes)} GiB on {self.gpu}"
        parts = f"reserved {format_gib(self.reserved_bytes)}, non-PyTorch about {format_gib(self.non_torch_bytes)}"
        if self.fits:
            extra = " It only fits because cached memory is freed when the GPU is full." if self.flushes else ""
            return f"Fits: {need} ({parts}; {self.kept}).{extra}{self._variants()}"
        if self.host is not None and self.host.fits is False and self.needed_bytes <= self.limit_bytes:
            held = f"{format_gib(self.host.needed_bytes)} GiB of {format_gib(self.host.total_bytes or 0)} GiB"
            return f"Does not fit: the host needs {held}; the GPU would do ({need})."
        return f"Does not fit: {need} ({parts}; {self.kept}); highest in {self.phase}.{self._variants()}"

    def _variants(self) -> str:
        """Say how far variants of the run lie apart, and what decides where one of them does not fit."""
        told = self.ensemble
        if told is None or told.lowest_bytes == told.highest_bytes:
            return ""
        low, high = (format_gib(size + self.non_torch_bytes) for size in (told.lowest_bytes, told.highest_bytes))
        words = f" {told.members} variants of it (workspaces, a token shorter) need {low} to {high} GiB"
        return words + (f"; {told.failed} of them run out of memory." if told.failed else ".")


def _generation(need: GenerationNeed) -> str:
    sizes = f"allocates {format_gib(need.held_bytes)} GiB and reserves {format_gib(need.reserved_bytes)}"
    if not need.flushes:
        return f"Generation {sizes}, without giving memory back."
    words = f"Generation {sizes}: the cache grows token by token, and the allocator gives cached memory back"
    often = "once" if need.flushes == 1 else f"{need.flushes} times"
    advice = "" if need.expandable else f" With {EXPANDABLE_SEGMENTS} segments grow instead."
    return f"{words} {often} to go on.{advice}"


def host_need(analysis: Analysis) -> HostNeed:
    """Add up what the node's processes need of its host; say whether ``host_memory``, where given, is enough."""
    run = analysis.snapshot.run
    config = KnownSettings.of(run.config)
    needed = host_use(run.host, min(config.gpus or 1, config.gpus_per_node or 1)).needed_bytes
    total = parse_size(config.host_memory) if config.host_memory else None
    return HostNeed(needed_bytes=needed, total_bytes=total, fits=None if total is None else needed <= total)


def verdict_of(
    analysis: Analysis, gpu: Gpu, *, fits: bool, flushes: bool, ensemble: Ensemble | None = None
) -> FitVerdict:
    """Compare a simulated run's device peak with what the GPU has; the others: as of :class:`FitVerdict`."""
    peak = analysis.device_peak
    assert peak is not None
    return FitVerdict(
        gpu=gpu.name,
        total_bytes=gpu.total_bytes,
        needed_bytes=peak.reserved_bytes + gpu.context_bytes,
        reserved_bytes=peak.reserved_bytes,
        non_torch_bytes=gpu.context_bytes,
        margin=margin_kept(analysis),
        kept=words_of(kept_for(KnownSettings.of(analysis.snapshot.run.config), gpu)),
        fits=fits,
        flushes=flushes,
        phase=Phase(peak.phase),
        phases=_needs(analysis, gpu, flushes),
        ensemble=ensemble,
        generation=analysis.snapshot.run.generation,
    )


def _needs(analysis: Analysis, gpu: Gpu, flushes: bool) -> tuple[PhaseNeed, ...]:
    """List what each phase needs, in the order in which the phases begin."""
    from memprof.analysis.curves import phase_maxima

    room = room_bytes(gpu, margin_kept(analysis))
    return tuple(
        PhaseNeed(
            phase=Phase(phase),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            needed_bytes=reserved + gpu.context_bytes,
            fits=flushes or reserved <= room,
        )
        for phase, (allocated, reserved) in phase_maxima(analysis.timeline, analysis.attribution).items()
    )
