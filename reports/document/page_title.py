"""Title a page, of one process or of a run's ranks, and say below the title what was recorded, where and how."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath

from memprof.reports.document.text import HISTORY_WORDS, KIND_WORDS, sentence_list, thousands

from memprof.report import Report
from memprof.units import gib
from memprof.vocabulary import EMULATED, History

_MODEL_KEYS = ("model", "model_name", "model_name_or_path", "_name_or_path", "name_or_path")


def base_name(path: str) -> str:
    """Return a file's name, whichever way its path is written."""
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name


def title_of(report: Report) -> str:
    """Name a report's run: by its model and how many ranks it has, else by its file or folder."""
    source, config = report.source, report.source.config or {}
    model = next((name for key in _MODEL_KEYS if isinstance(name := config.get(key), str) and name), None)
    if report.across_ranks and report.ranks:
        return _run_title(report, model)
    if model:
        return base_name(model.rstrip("/")) or model
    return base_name(source.files[0]) if source.files else "Memory report"


def _run_title(report: Report, model: str | None) -> str:
    """Name a run of several ranks: by its model, else by the folder that contains all its files."""
    ranks, world = len(report.ranks), report.across_ranks.world_size if report.across_ranks else None
    count = f"{ranks} of {world} ranks" if world and world != ranks else f"{ranks} rank{'' if ranks == 1 else 's'}"
    folders = {PurePosixPath(rank.file).parent for rank in report.ranks if rank.file}
    folder = folders.pop() if len(folders) == 1 else PurePosixPath()
    # The callback's own folder says nothing; the trainer's output folder is above it.
    inner = folder.parent if folder.name.startswith("_memprof") else folder
    name = base_name(model.rstrip("/")) if model else inner.name
    return f"{name}: {count}" if name else f"Run of {count}"


def subtitle_of(report: Report) -> tuple[str, ...]:
    """Say what was recorded, where and how."""
    source, name = report.source, report.source.device_name
    words = [KIND_WORDS[source.kind]]
    if (name or "").endswith(EMULATED):
        words[0] += " on an emulated device: memory is real, kernels and times are not"
    device, total = name or f"device {source.device}", source.device_total_bytes
    words.append(f"{device}, {gib(total)} GiB" if total and report.peak.reserved_bytes is not None else device)
    if others := [str(index) for index in source.devices if index != source.device]:
        own = f"device {source.device}; " if name else ""
        words[-1] += f" ({own}the file also has {sentence_list(others)}, see --device)"
    if source.torch:
        words.append(f"torch {source.torch}")
    if (source.world_size or 1) > 1:
        shown = " shown in full" if report.across_ranks else ""
        words.append(f"rank {source.rank} of {source.world_size}{shown}")
    words.append(f"{thousands(source.events)} event{'' if source.events == 1 else 's'}")
    if steps := sorted({phase.step for phase in report.phases if phase.step is not None}):
        words.append(f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}")
    if source.history != History.COMPLETE:
        words.append(HISTORY_WORDS[source.history])
    return tuple(words)
