"""Read the result of one simulation, which another process or the cache wrote as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memprof.errors import InputError
from memprof.report.base import ByCategory, Bytes, Model, Positive, written
from memprof.vocabulary import Phase


class SimulatedVerdict(Model, frozen=True, kw_only=True):
    """What advice needs of a verdict on a GPU: its non-PyTorch memory."""

    non_torch_bytes: Bytes


class SimulatedRow(Model, frozen=True, kw_only=True):
    """What advice needs of a simulation (:func:`memprof.simulate.evaluate.summary_of`); sizes in bytes.

    Attributes:
        peak_bytes: allocated peak.
        peak_phase: its phase.
        device_peak_bytes: reserved memory; with a verdict, plus non-PyTorch memory.
        host_bytes: host memory.
        categories: of the allocated peak.
        phases: allocated peak of each phase.
        phase_categories: of each phase's peak.
        verdict: whether it fits, if a GPU was given.
        fits: the same in short.
        step_s: estimated seconds of a step, if the GPU model is known.
    """

    peak_bytes: Bytes
    peak_phase: Phase
    device_peak_bytes: Bytes | None
    host_bytes: Bytes
    categories: ByCategory = written({})
    phases: Mapping[Phase, Bytes] = written({})
    phase_categories: Mapping[Phase, ByCategory] = written({})
    verdict: SimulatedVerdict | None = None
    fits: bool | None = None
    step_s: Positive | None = None

    @property
    def non_torch_bytes(self) -> int:
        """Return the part of ``device_peak_bytes`` that is not PyTorch's."""
        return 0 if self.verdict is None else self.verdict.non_torch_bytes


def read_row(row: object) -> SimulatedRow:
    """Validate a simulation's result.

    Raises:
        InputError: it is damaged.
    """
    try:
        return msgspec.convert(row, SimulatedRow)
    except msgspec.ValidationError as error:
        raise InputError(f"the result of a simulation is damaged ({error}); try again with --no-cache.") from None
