"""Serve the tab: the list of recordings, their report pages and comparisons."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from memprof.integrations.board.pages import Pages
from memprof.integrations.board.recordings import BoardRecording, Recordings
from tensorboard.backend import http_util
from tensorboard.plugins.base_plugin import FrontendMetadata, TBPlugin
from werkzeug import wrappers

from memprof.analysis.counters import read_counters
from memprof.analysis.ranks.run_folders import run_started
from memprof.errors import InputError
from memprof.units import amount
from memprof.vocabulary import phase_words

if TYPE_CHECKING:
    from collections.abc import Callable


def _app(answer: Any) -> Any:
    """Make a WSGI application of a method that answers one request."""
    return wrappers.Request.application(answer)


class MemoryTab(TBPlugin):  # type: ignore[misc, unused-ignore]
    """Serve TensorBoard's tab ``memprof``, from memprof's own files below the log directory only."""

    plugin_name = "memprof"

    def __init__(self, context: Any) -> None:
        self._recordings = Recordings(_places(context))
        self._pages = Pages()
        self._read: dict[Path, tuple[tuple[int, int], _Listed | None]] = {}

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return the handler of each address below ``data/plugin/memprof``."""
        return {
            "/static/index.js": self._script,
            "/recordings": self._list,
            "/trend": self._steps,
            "/page": self._report,
            "/compare": self._comparison,
        }

    def is_active(self) -> bool:
        """Tell whether there is any recording to show."""
        try:
            return bool(self._recordings.all())
        except Exception:
            return False

    def frontend_metadata(self) -> Any:
        """Return the name of the tab and the address of its script."""
        return FrontendMetadata(es_module_path="/static/index.js", tab_name="Memory")

    @_app
    def _script(self, request: Any) -> Any:
        text = files("memprof.integrations.board").joinpath("static/index.js").read_text(encoding="utf-8")
        return http_util.Respond(request, text, "text/javascript")

    @_app
    def _list(self, request: Any) -> Any:
        try:
            recordings = self._recordings.all()
            listed = self._listed(recordings)
            found = msgspec.to_builtins([_row(r, listed.get(r.json)) for r in _newest_run_first(recordings)])
        except Exception as error:
            return http_util.Respond(request, {"recordings": [], "problem": repr(error)}, "application/json")
        return http_util.Respond(request, {"recordings": found}, "application/json")

    @_app
    def _steps(self, request: Any) -> Any:
        try:
            chosen = self._chosen(request.args, "")
            trend = _trend(chosen) if chosen is not None else _Trend()
        except Exception as error:
            return http_util.Respond(request, {"problem": repr(error)}, "application/json", code=500)
        return http_util.Respond(request, msgspec.to_builtins(trend), "application/json")

    def _listed(self, recordings: list[BoardRecording]) -> dict[Path | None, _Listed | None]:
        """Return what the list shows of each report. A report is read again only if its size or time changed."""
        read: dict[Path, tuple[tuple[int, int], _Listed | None]] = {}
        for path in (r.json for r in recordings if r.json is not None):
            try:
                status = path.stat()
            except OSError:
                continue
            version = (status.st_mtime_ns, status.st_size)
            known = self._read.get(path)
            read[path] = known if known is not None and known[0] == version else (version, _read_listed(path))
        self._read = read  # what was deleted is forgotten
        return {path: listed for path, (_, listed) in read.items()}

    @_app
    def _report(self, request: Any) -> Any:
        return self._answer(request, ("",))

    @_app
    def _comparison(self, request: Any) -> Any:
        return self._answer(request, ("a_", "b_"))

    def _answer(self, request: Any, prefixes: tuple[str, ...]) -> Any:
        try:
            chosen = [self._chosen(request.args, prefix) for prefix in prefixes]
            found = [r for r in chosen if r is not None]
            if len(found) != len(chosen):
                return http_util.Respond(request, "no such recording", "text/plain", code=404)
            page = self._pages.of(found)
        except Exception as error:
            return http_util.Respond(request, f"memprof: {error!r}", "text/plain", code=500)
        return http_util.Respond(request, page.text, "text/html", csp_scripts_sha256s=page.hashes)

    def _chosen(self, arguments: Any, prefix: str) -> BoardRecording | None:
        step, rank = arguments.get(f"{prefix}step", ""), arguments.get(f"{prefix}rank", "")
        if not (step.isascii() and step.isdigit() and rank.isascii() and rank.isdigit() and len(step + rank) < 20):
            return None
        return self._recordings.get(arguments.get(f"{prefix}run", ""), int(step), int(rank))


def _newest_run_first(found: list[BoardRecording]) -> list[BoardRecording]:
    """Order recordings by run, the run that started last first: the tab shows the first one."""
    folders = {r.run: r.pickle.parent for r in found}
    # Of one run there is nothing to read.
    started = {run: run_started(folder) for run, folder in folders.items()} if len(folders) > 1 else {}
    return sorted(found, key=lambda r: (-started.get(r.run, 0.0), r.run, r.step, r.rank))


def _places(context: Any) -> list[tuple[str, Path]]:
    """Return the folders TensorBoard was started on: ``--logdir``, or each of ``--logdir_spec`` with its name."""
    spec = getattr(context.flags, "logdir_spec", "") or "" if context.flags is not None else ""
    if context.logdir or not spec:
        return [("", Path(context.logdir).expanduser())] if context.logdir and "://" not in context.logdir else []
    places = []
    for part in spec.split(","):
        name, colon, folder = part.partition(":")
        named = bool(colon) and "/" not in name
        if "://" not in part:
            places.append((name if named else "", Path(folder if named else part).expanduser()))
    return places


class _ListedPeak(msgspec.Struct):
    allocated_bytes: int
    phase: str | None


class _ListedFailure(msgspec.Struct):
    requested_bytes: int


class _Listed(msgspec.Struct):
    """What the list of recordings shows of a report."""

    peak: _ListedPeak
    oom: _ListedFailure | None = None

    @property
    def words(self) -> str:
        """The peak in few words, for a list to choose from."""
        phase = self.peak.phase if self.peak.phase != "other" else None
        where = f" in {phase_words(phase)}" if phase else ""
        return amount(self.peak.allocated_bytes) + where + (", out of memory" if self.oom else "")


class _Row(msgspec.Struct, omit_defaults=True):
    """A recording in the list, as the tab's script reads it; the last two are its report's, if it has one."""

    run: str
    step: int
    rank: int
    changed: float
    peak_bytes: int | None = None
    peak: str | None = None


def _row(recording: BoardRecording, report: _Listed | None) -> _Row:
    """Describe a recording and, if it has been analysed, its peak."""
    row = _Row(recording.run, recording.step, recording.rank, round(recording.changed, 3))
    if report is not None:
        row.peak_bytes, row.peak = report.peak.allocated_bytes, report.words
    return row


class _Curve(msgspec.Struct):
    """One figure of every step; ``words`` are its newest and its highest value."""

    label: str
    bytes: list[int | None]
    words: str


class _Trend(msgspec.Struct):
    """The memory of a run's steps, from its counters file; empty if there is none."""

    steps: list[int] = []
    curves: list[_Curve] = []


# What is drawn of each step, in this order, where it is known. Host memory only if there is no device's.
_TREND = (("peak_reserved", "Peak reserved"), ("peak_allocated", "Peak allocated"), ("host_rss", "Host, resident"))


def _trend(recording: BoardRecording) -> _Trend:
    """Read how high memory rose in each step of the run that a recording belongs to."""
    path = recording.pickle.with_name(f"counters.rank-{recording.rank}.jsonl")
    if path.is_symlink():
        return _Trend()
    try:
        rows = read_counters(path).steps
    except InputError:
        return _Trend()
    trend = _Trend([row.step for row in rows])
    for name, label in _TREND:
        values = [row.size(name) for row in rows]
        known = [value for value in values if value is not None]
        if known and not (name == "host_rss" and any(curve.label == "Peak reserved" for curve in trend.curves)):
            words = f"{amount(known[-1])}, highest {amount(max(known))}"
            trend.curves.append(_Curve(label, values, words))
    return trend


def _read_listed(path: Path) -> _Listed | None:
    """Read what the list shows of a report's JSON; None if the file is no such report."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(64 * 2**20), type=_Listed)
    except (OSError, RecursionError, msgspec.MsgspecError):
        return None
