"""Whether a simulated run fits a GPU: taken on what the device has to give, not on what the program holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memprof.simulate.gpus import Gpu
from memprof.units import format_gib

if TYPE_CHECKING:
    from memprof.analysis import Analysis
    from memprof.simulate.settings import Settings

__all__ = ["MARGIN", "Outcome", "Verdict", "evaluate"]

# Demanded above the prediction before a run is said to fit. Simulated and recorded reserved bytes differed by less
# than one percent on the captures they were compared on (docs/simulating.md); this is three times that.
MARGIN = 0.03


@dataclass(frozen=True)
class Verdict:
    """Bytes of one run on one GPU. ``needed_bytes`` is reserved plus what is held outside torch.

    ``flushes`` says that it fits only because the allocator gives cached segments back when the card is full, which
    costs time at every step.
    """

    gpu: str
    total_bytes: int
    needed_bytes: int
    reserved_bytes: int
    non_torch_bytes: int
    margin: float
    fits: bool
    flushes: bool
    phase: str

    @property
    def headroom_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.total_bytes - self.needed_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "headroom_bytes": self.headroom_bytes}

    def sentence(self) -> str:
        """What a person is told."""
        need = f"needs {format_gib(self.needed_bytes)} GiB of {format_gib(self.total_bytes)} GiB on {self.gpu}"
        parts = f"reserved {format_gib(self.reserved_bytes)}, outside torch about {format_gib(self.non_torch_bytes)}"
        if self.fits:
            extra = " It only fits because cached memory is given back when the card is full." if self.flushes else ""
            return f"Fits: {need} ({parts}; {self.margin:.0%} kept for the prediction's error).{extra}"
        kept = f"{self.margin:.0%} kept for the prediction's error"
        return f"Does not fit: {need} ({parts}; {kept}); highest in {self.phase}."


@dataclass(frozen=True)
class Outcome:
    """A simulation: its raw snapshot, that snapshot's analysis, and the verdict where a GPU was given."""

    raw: dict[str, Any]
    analysis: Analysis
    verdict: Verdict | None


def evaluate(settings: Settings, gpu: Gpu | None, *, stacks: bool = True) -> Outcome:
    """Simulate, and compare with what the GPU has.

    A run whose reserved memory is too high while its live memory is not is simulated again on a card of that size:
    the allocator then gives cached segments back before it fails, as the real one does.

    Raises:
        InputError, UsageError: as :func:`memprof.simulate.run.simulate_settings`.
    """
    from memprof.simulate.run import simulate_settings

    raw = simulate_settings(settings, gpu=gpu, stacks=stacks)
    analysis = _analyse(raw)
    if gpu is None or analysis.device_peak is None:
        return Outcome(raw, analysis, None)
    room = int(gpu.total_bytes / (1 + MARGIN)) - gpu.context_bytes
    verdict = _verdict(analysis, gpu, fits=analysis.device_peak.reserved_bytes <= room, flushes=False)
    if verdict.fits or int(analysis.timeline.active.max()) > room:
        return Outcome(raw, analysis, verdict)
    again = simulate_settings(settings, gpu=gpu, capacity=room, stacks=stacks)
    if again["memprof"]["oom"] is not None:
        return Outcome(raw, analysis, verdict)
    squeezed = _analyse(again)
    return Outcome(again, squeezed, _verdict(squeezed, gpu, fits=True, flushes=True))


def _analyse(raw: dict[str, Any]) -> Analysis:
    import copy

    from memprof.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    # Reading consumes the lists of the dict it is given; the events themselves are shared.
    shallow = {
        **raw,
        "segments": copy.deepcopy(raw["segments"]),
        "device_traces": [list(t) for t in raw["device_traces"]],
    }
    return analyze(snapshot_from_raw(shallow))


def _verdict(analysis: Analysis, gpu: Gpu, *, fits: bool, flushes: bool) -> Verdict:
    peak = analysis.device_peak
    assert peak is not None
    return Verdict(
        gpu=gpu.name,
        total_bytes=gpu.total_bytes,
        needed_bytes=peak.reserved_bytes + gpu.context_bytes,
        reserved_bytes=peak.reserved_bytes,
        non_torch_bytes=gpu.context_bytes,
        margin=MARGIN,
        fits=fits,
        flushes=flushes,
        phase=peak.phase,
    )
