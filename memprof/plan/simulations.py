"""Describe a simulation that another process is asked for, and the row that it answers with."""

from __future__ import annotations

from collections.abc import Mapping

from memprof.config.gpus import Gpu
from memprof.errors import InputError
from memprof.report.base import ByCategory, Bytes, Model, Positive, Settings, written
from memprof.report.simulation import PhaseNeed
from memprof.vocabulary import Category, Phase

#: Settings that a search changes: lengths, batches and numbers of generations.
Changes = Mapping[str, int | None]


class SizeChoices(Model, frozen=True, kw_only=True):
    """What a search may change settings to.

    Attributes:
        of: the settings, as given.
        first: changes of them, from those that need least memory to the most wanted.
        more: what may be changed further, in the same order.
        enough: the share of the memory that may be used with which a search ends.
    """

    of: Settings
    first: tuple[Changes, ...]
    more: tuple[Changes, ...] = written(())
    enough: Positive


class SimulationRequest(Model, frozen=True, kw_only=True):
    """A simulation to make.

    Attributes:
        settings: as :meth:`memprof.config.settings.Settings.to_dict` writes them.
        gpu: a GPU's name or memory size, or a GPU with a size of its own; ``None`` for no verdict.
        sizes: asks for the row's ``largest``.
    """

    settings: Settings
    gpu: str | Gpu | None
    sizes: SizeChoices | None = None


class SimulatedVerdict(Model, frozen=True, kw_only=True):
    """Whether a simulated run fits a GPU; sizes in bytes, as in ``fit`` of the report.

    Attributes:
        limit_bytes: the most that the need may be.
        needed_bytes: reserved plus non-PyTorch memory.
        non_torch_bytes: non-PyTorch memory.
        phases: each phase at its highest.
    """

    limit_bytes: Bytes = written(0)
    needed_bytes: Bytes = written(0)
    non_torch_bytes: Bytes = written(0)
    phases: tuple[PhaseNeed, ...] = written(())


class SimulatedRow(Model, frozen=True, kw_only=True):
    """The sum of a simulation; sizes in bytes.

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
        largest: changes of the settings of :class:`SizeChoices`, the most wanted that fit; ``None`` if none were asked
            for or none is near to fitting.
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
    largest: Changes | None = None

    @property
    def largest_category(self) -> Category:
        """Return the largest category of the allocated peak."""
        return max(self.categories, key=lambda name: self.categories[name], default=Category.UNATTRIBUTED)

    @property
    def needed_bytes(self) -> int:
        """Return reserved and non-PyTorch memory if a GPU was simulated, else allocated memory."""
        return self.peak_bytes if self.device_peak_bytes is None else self.device_peak_bytes

    @property
    def non_torch_bytes(self) -> int:
        """Return the part of ``device_peak_bytes`` that is not PyTorch's."""
        return 0 if self.verdict is None else self.verdict.non_torch_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Return the most that ``device_peak_bytes`` may be, if a GPU was given."""
        return None if self.verdict is None else self.verdict.limit_bytes


class SimulationResult(Model, frozen=True, kw_only=True):
    """The answer of a process that simulates: a row, or a sentence and the exit code of its error."""

    row: SimulatedRow | None = None
    error: str | None = None
    exit_code: int = InputError.exit_code
