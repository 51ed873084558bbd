"""Whether a simulated run fits a GPU: taken on what the device has to give, not on what the program holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from memprof.config.expected_error import MARGIN, room_bytes
from memprof.config.gpus import Gpu, find_gpu
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.simulate.recorder.host_memory import host_use
from memprof.units import format_gib, parse_size

if TYPE_CHECKING:
    from memprof.analysis.analysis import Advisor, Analysis

__all__ = [
    "HostNeed",
    "Outcome",
    "PhaseNeed",
    "Verdict",
    "evaluate",
    "judge",
    "run_row",
    "summary_of",
]


@dataclass(frozen=True)
class PhaseNeed:
    """The most one phase holds (``allocated_bytes``) and has reserved; ``needed_bytes`` adds what is outside torch."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    needed_bytes: int
    fits: bool


@dataclass(frozen=True)
class HostNeed:
    """Host memory of all the processes on it; ``fits`` is None where the host's size is not known."""

    needed_bytes: int
    total_bytes: int | None
    fits: bool | None


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
    phases: tuple[PhaseNeed, ...] = ()
    host: HostNeed | None = None

    @property
    def limit_bytes(self) -> int:
        """What the prediction must not exceed."""
        return int(self.total_bytes / (1 + self.margin))

    @property
    def headroom_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.total_bytes - self.needed_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``fit`` of the report."""
        plain = asdict(self)
        plain["phases"] = [asdict(need) for need in self.phases]
        return {
            **plain,
            "limit_bytes": self.limit_bytes,
            "headroom_bytes": self.headroom_bytes,
            "sentence": self.sentence(),
        }

    def sentence(self) -> str:
        """What a person is told."""
        need = f"needs {format_gib(self.needed_bytes)} GiB of {format_gib(self.total_bytes)} GiB on {self.gpu}"
        parts = f"reserved {format_gib(self.reserved_bytes)}, outside torch about {format_gib(self.non_torch_bytes)}"
        if self.fits:
            extra = " It only fits because cached memory is given back when the card is full." if self.flushes else ""
            return f"Fits: {need} ({parts}; {self.margin:.0%} kept for the prediction's error).{extra}"
        if self.host is not None and self.host.fits is False and self.needed_bytes <= self.limit_bytes:
            held = f"{format_gib(self.host.needed_bytes)} GiB of {format_gib(self.host.total_bytes or 0)} GiB"
            return f"Does not fit: the host needs {held}; the GPU would do ({need})."
        kept = f"{self.margin:.0%} kept for the prediction's error"
        return f"Does not fit: {need} ({parts}; {kept}); highest in {self.phase}."


@dataclass(frozen=True)
class Outcome:
    """A simulation: its raw snapshot, that snapshot's analysis, and the verdict where a GPU was given."""

    raw: dict[str, Any]
    analysis: Analysis
    verdict: Verdict | None


def evaluate(
    settings: Settings, gpu: Gpu | None, *, stacks: bool = True, advisor: Advisor | None = None
) -> Outcome:
    """Simulate, and compare with what the GPU has. ``advisor`` fills the report's ``advice``.

    A run whose reserved memory is too high while its live memory is not is simulated again on a card of that size:
    the allocator then gives cached segments back before it fails, as the real one does.

    Raises:
        InputError, UsageError: as :func:`memprof.simulate.run.simulate_settings`.
    """
    from memprof.simulate.run import simulate_settings

    if settings.host_memory is not None and gpu is None:
        raise UsageError("--host-memory is judged together with a card: say which one with --gpu.")
    return judge(lambda room: simulate_settings(settings, gpu=gpu, capacity=room, stacks=stacks), gpu, advisor)


def judge(
    run: Callable[[int | None], dict[str, Any]], gpu: Gpu | None, advisor: Advisor | None = None
) -> Outcome:
    """Judge anything that can be simulated: ``run(capacity)`` returns a raw snapshot."""
    raw = run(None)
    analysis = _analyse(raw, advisor)
    if gpu is None or analysis.device_peak is None:
        return _outcome(raw, analysis, None)
    room = room_bytes(gpu)
    verdict = _verdict(analysis, gpu, fits=analysis.device_peak.reserved_bytes <= room, flushes=False)
    if verdict.fits or int(analysis.timeline.active.max()) > room:
        return _outcome(raw, analysis, verdict)
    again = run(room)
    if again["memprof"]["oom"] is not None:
        return _outcome(raw, analysis, verdict)
    squeezed = _analyse(again, advisor)
    return _outcome(again, squeezed, _verdict(squeezed, gpu, fits=True, flushes=True))


def _outcome(raw: dict[str, Any], analysis: Analysis, verdict: Verdict | None) -> Outcome:
    """The verdict goes into the snapshot, and from there into everything that is said about it."""
    if verdict is not None:
        host = _host_need(raw)
        verdict = replace(verdict, host=host, fits=verdict.fits and host.fits is not False)
        raw["memprof"]["fit"] = analysis.snapshot.extra["fit"] = verdict.to_dict()
    return Outcome(raw, analysis, verdict)


def _host_need(raw: dict[str, Any]) -> HostNeed:
    """What the node's processes need together, and whether it is there where ``host_memory`` says how much is."""
    config = raw["memprof"]["config"] or {}
    processes = min(int(config.get("gpus") or 1), int(config.get("gpus_per_node") or 1))
    needed = host_use(raw, processes).needed_bytes
    given = config.get("host_memory")
    total = parse_size(given) if given else None
    return HostNeed(needed, total, None if total is None else needed <= total)


def _analyse(raw: dict[str, Any], advisor: Advisor | None) -> Analysis:
    import copy

    from memprof.analysis.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    # Reading consumes the lists of the dict it is given; the events themselves are shared.
    shallow = {
        **raw,
        "segments": copy.deepcopy(raw["segments"]),
        "device_traces": [list(t) for t in raw["device_traces"]],
    }
    return analyze(snapshot_from_raw(shallow), advisor=advisor)


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
        phases=_needs(analysis, gpu, flushes),
    )


def _needs(analysis: Analysis, gpu: Gpu, flushes: bool) -> tuple[PhaseNeed, ...]:
    """What each phase needs, in the order in which the phases begin."""
    from memprof.analysis.curves import phase_maxima

    room = room_bytes(gpu)
    return tuple(
        PhaseNeed(phase, allocated, reserved, reserved + gpu.context_bytes, flushes or reserved <= room)
        for phase, (allocated, reserved) in phase_maxima(analysis.timeline, analysis.attribution).items()
    )


def run_row(settings: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """Simulate settings given as plain data (so that a worker process can) and return a row of plain data."""
    values = {**settings, "lora_target_modules": tuple(settings["lora_target_modules"])}
    card = find_gpu(gpu) if gpu is not None else None
    return summary_of(evaluate(Settings(**values), card))


def summary_of(outcome: Outcome) -> dict[str, Any]:
    """Peaks by phase, the largest category, the verdict and the host's share; sizes in bytes."""
    analysis = outcome.analysis
    categories = analysis.peak.categories
    phases: dict[str, int] = {}
    alive: dict[str, dict[str, int]] = {}
    for breakdown in analysis.phases:
        if breakdown.allocated_bytes > phases.get(breakdown.phase, -1):
            phases[breakdown.phase] = breakdown.allocated_bytes
            alive[breakdown.phase] = {name: size for name, size in breakdown.categories.items() if size}
    host = outcome.raw["memprof"]["host"]
    device_peak = analysis.device_peak
    return {
        "peak_bytes": analysis.peak.allocated_bytes,
        "peak_phase": analysis.peak.phase,
        "device_peak_bytes": _device_bytes(outcome.verdict, device_peak),
        "host_bytes": int(host["pinned_bytes"] + host["managed_bytes"]),
        "largest_category": max(categories, key=lambda name: categories[name]),
        "categories": {name: size for name, size in categories.items() if size},
        "phases": phases,
        "phase_categories": alive,
        "verdict": outcome.verdict.to_dict() if outcome.verdict is not None else None,
        "fits": outcome.verdict.fits if outcome.verdict is not None else None,
    }


def _device_bytes(verdict: Verdict | None, device_peak: Any) -> int | None:
    if verdict is not None:
        return verdict.needed_bytes
    return device_peak.reserved_bytes if device_peak is not None else None
