"""Describe the answer to a run: its headline, what to change, and a combination of changes that fits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memprof.report.base import ByCategory, Bytes, Model, Settings, Share, written
from memprof.vocabulary import Phase


class Place(Model, frozen=True, kw_only=True):
    """A line of code in the headline.

    Attributes:
        frame: ``file:line``.
        bytes: of the category that the headline names, allocated there.
        share: of that category.
    """

    frame: str
    bytes: Bytes
    share: Share


class Headline(Model, frozen=True, kw_only=True):
    """The answer in sentences; each may be empty.

    Attributes:
        verdict: what happened, or whether it fits.
        cause: what the memory was used for.
        places: up to four lines of code that allocated the category named last in ``cause``.
        action: the first thing to change.
        assumed: settings of a simulation that were not given.
    """

    verdict: str
    cause: str
    places: tuple[Place, ...]
    action: str
    assumed: tuple[str, ...]


class Advice(Model, frozen=True, kw_only=True):
    """One entry of ``advice``: a change that lowers the peak.

    Attributes:
        id: short name of the change.
        action: what to do.
        setting: what to paste.
        saves_bytes: how much lower the peak is.
        costs: what it costs, and why.
        exact: whether gradients stay the same, up to rounding.
        toll: 0 nothing, 1 time, 2 a package, host memory or a GPU, 3 lower precision, 4 fewer trained parameters,
            5 other data or another objective.
        basis: ``simulated`` or ``estimated``.
        peak: ``allocated``, or ``device`` for changes of reserved memory only.
        takes: bytes by category that it saves at the highest peak.
        peak_after_bytes: what is left of the allocated peak.
        moves_to: the phase of that peak, if it is another one.
        device_saves_bytes: how much lower reserved memory is (simulated; may be negative).
        host_bytes: host memory that it uses.
        time_ratio: estimated duration of a step, as a multiple of today's.
        enough: after running out of memory, whether the change alone is sufficient; ``None`` if the step was not
            recorded completely.
        enough_with: ids of the changes that are sufficient together with it.
        enough_words: the same in words, for the first entry.
    """

    id: str | None = None
    action: str
    setting: str | None = None
    saves_bytes: Bytes
    costs: str
    exact: bool
    toll: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    basis: Literal["simulated", "estimated"]
    peak: Literal["allocated", "device"] | None = None
    takes: ByCategory | None = None
    peak_after_bytes: Bytes | None = None
    moves_to: Phase | None = None
    device_saves_bytes: int | None = None
    host_bytes: Bytes | None = None
    time_ratio: Annotated[float, msgspec.Meta(gt=0)] | None = None
    enough: bool | msgspec.UnsetType | None = msgspec.UNSET
    enough_with: tuple[str, ...] | None = None
    enough_words: str | None = None


class Unchanged(Model, frozen=True, kw_only=True):
    """A recorded run compared with its own simulation.

    Attributes:
        measured_bytes: allocated peak of the run.
        simulated_bytes: allocated peak of its simulation.
        assumed: settings that the recording does not contain.
    """

    measured_bytes: Bytes
    simulated_bytes: Bytes
    assumed: tuple[str, ...]


class CombinedChange(Model, frozen=True, kw_only=True):
    """One of the changes of a combination; fields as in ``advice``."""

    id: str
    action: str
    setting: str
    costs: str
    exact: bool


class Combination(Model, frozen=True, kw_only=True):
    """Changes that together make a run fit on a GPU, or come nearest to it.

    Attributes:
        gpu: the GPU.
        total_bytes: its memory.
        fits: whether the run with all changes fits.
        before_bytes: reserved plus non-PyTorch memory without the changes.
        after_bytes: the same with the changes.
        shift_bytes: added to both: what the run reserved beyond its own simulation.
        margin: the share added for the prediction's error.
        phase: phase of the changed run's peak.
        changes: none can be left out.
        settings: the changed run, as ``memprof simulate`` takes it; empty if estimated.
        basis: ``simulated`` or ``estimated``.
        sentence: the same in words.
    """

    gpu: str
    total_bytes: Bytes
    fits: bool
    before_bytes: Bytes
    after_bytes: Bytes
    shift_bytes: int
    margin: float
    phase: Phase
    changes: tuple[CombinedChange, ...]
    settings: Settings
    basis: Literal["simulated", "estimated"] | None = written(None)
    sentence: str
