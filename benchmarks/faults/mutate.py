"""Feed mutated inputs of every kind to what reads them.

    python -m benchmarks.faults mutate [--inputs 2000] [--seed 0] [--only snapshot] [--commands 1]

Values of small valid inputs are dropped, exchanged or replaced by what nobody writes, or their bytes are. Each mutant
must be answered, or refused in one sentence; JSON that is answered must be what its schema says, and no control
character may come through. ``--commands N`` puts one in N of the snapshots, reports, comparisons and counters through
a whole command; the others, and all other kinds, through the functions behind it, which is many times faster. Every
finding is printed once by its kind, with the seed of the input that shows it. Inputs run in forked processes, so that
one which ends or outlasts its process is a finding too.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.faults import fields
from benchmarks.faults import inputs as valid
from benchmarks.measure import environment
from benchmarks.tabling import read

if TYPE_CHECKING:
    from memprof.report import Report

#: Mutants of plain data, which whole commands read.
SEEDS = ("snapshot", "report", "compare", "counters")
#: All kinds; those after :data:`SEEDS` go through functions only.
KINDS = (*SEEDS, "fields", "answers", "bytes", "ranks", "settings", "text")
# An input of a million takes 2 ms; one that takes this long hangs.
_SECONDS = 20
_MOST_MEMORY = 2 << 30
_BATCH = 20_000  # each fork compiles the schemas of what it meets anew
# What may not reach a terminal: escapes, and what turns the reading direction round.
_CONTROL = ("\x1b", "\x07", "\r", "\u202e", "\x00", "\x9b")
_COMMANDS = {
    "snapshot": (
        "report {0} --json -", "report {0}", "report {0} -o {page}", "report {0} --format markdown --redact",
        "explain {0} --json -", "explain {0}", "compare {0} {good} --json -", "report {good} {0} --json -",
    ),
    "report": (
        "report {0} --json -", "report {0}", "report {0} -o {page}", "report {0} --format markdown --redact",
        "report {0} {good} --json -", "report {good} {0} -o {page}", "compare {good} {0} --json -",
        "compare {0} {good} -o {page}", "compare {good} {0} --capacity 24GB", "report {folder} --json -",
        "report {0} --json - --capacity 8GB", "explain {0}", "advise {0} --estimate --json -",
    ),
    "compare": ("compare {0} --json -", "compare {0} {good}", "compare {good} {0} -o {page}", "report {0}"),
    "counters": ("watch {folder} --once", "watch {folder} --format json"),
}  # fmt: skip


class Invalid(Exception):
    """An answer is not what its schema says."""


class Hang(BaseException):
    """An input took longer than :data:`_SECONDS`."""


class Mutants:
    """Make mutants of the valid inputs, and run each, all by the kind and number of the input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = {"snapshot": "good.pickle", "report": "good.json", "compare": "pair.json"}
        self.good = {kind: folder / name for kind, name in names.items()}
        seeds: dict[str, Any] = {"snapshot": valid.snapshot()}
        self.good["snapshot"].write_bytes(pickle.dumps(seeds["snapshot"], protocol=4))
        for kind, words in (("report", "report {snapshot}"), ("compare", "compare {snapshot} {report}")):
            _call([*words.format(**self.good).split(), "--json", str(self.good[kind])])
            seeds[kind] = json.loads(self.good[kind].read_text(encoding="utf-8"))
        seeds["counters"] = valid.counters()
        seeds["settings"], seeds["model"] = valid.settings(), valid.model_config()
        self._plain = {kind: pickle.dumps(seed) for kind, seed in seeds.items()}
        self._texts = valid.texts()
        self._files = self._as_bytes(seeds)
        self._snapshots = [(raw, fields.fields_of(raw)) for raw in fields.snapshots()]
        self._answers = [(plain, list(fields.places(plain))) for plain in fields.answers(seeds)]

    @staticmethod
    def _as_bytes(seeds: dict[str, Any]) -> list[tuple[str, bytes]]:
        """Return the names and bytes of files that commands take, in every form."""
        report = json.dumps(seeds["report"]).encode()
        return [
            ("run.pickle", pickle.dumps(seeds["snapshot"], protocol=4)),
            ("run.pickle", pickle.dumps(seeds["snapshot"], protocol=2)),
            ("run.json", json.dumps(seeds["snapshot"]).encode()),
            ("report.json", report),
            ("pair.json", json.dumps(seeds["compare"]).encode()),
        ]

    def run(self, kind: str, seed: int, command: bool = True) -> str:
        """Return what went wrong with one mutant; empty where nothing did.

        Args:
            kind: one of :data:`KINDS`.
            seed: the mutant's number.
            command: whether a kind of :data:`SEEDS` goes through a whole command.
        """
        draw = random.Random(f"{kind} {seed}")
        if kind not in SEEDS:
            return _ending(lambda: _OTHERS[kind](self, draw))
        mutant = self.mutant(kind, draw)
        words = draw.choice(_COMMANDS[kind]).split()
        path = self._write(kind, mutant)
        if not command:
            return _ending(lambda: _READERS[kind](path, draw))
        good = self.good.get("report" if kind == "compare" else kind, path)
        named = {"good": good, "page": self.folder / "page.html", "folder": path.parent}
        return _ending(lambda: _answer([word.format(path, **named) for word in words]))

    def mutant(self, kind: str, draw: random.Random) -> Any:
        """Return a valid input of ``kind`` with one to three of its values mutated."""
        mutant = pickle.loads(self._plain[kind])
        for _ in range(draw.choice((1, 1, 2, 3))):
            mutate(mutant, draw, kind)
        return mutant

    def _write(self, kind: str, mutant: Any) -> Path:
        place = self.folder / kind
        place.mkdir(exist_ok=True)
        if kind == "snapshot":
            (path := place / "run.pickle").write_bytes(pickle.dumps(mutant, protocol=4))
        elif kind == "counters":
            path = place / "counters.rank-0.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in mutant), encoding="utf-8")
        else:
            (path := place / "step-000001.json").write_text(json.dumps(mutant), encoding="utf-8")
        return path

    def fields(self, draw: random.Random) -> Iterator[str]:
        """Read a snapshot that has every field of the model, with junk in one of them."""
        mutant = self._with_junk(draw.choice(self._snapshots), draw)
        (path := self.folder / "fields.pickle").write_bytes(pickle.dumps(mutant, protocol=4))
        yield from _read_snapshot(path, draw)

    def answers(self, draw: random.Random) -> Iterator[str]:
        """Read an answer's JSON that has every field of its model, with junk in one of them."""
        mutant = self._with_junk(draw.choice(self._answers), draw)
        (path := self.folder / "answer.json").write_text(json.dumps(mutant), encoding="utf-8")
        yield from _read_answer(path, draw)

    @staticmethod
    def _with_junk(found: tuple[Any, list[tuple[Any, ...]]], draw: random.Random) -> Any:
        plain, places = found
        return fields.replaced(plain, draw.choice(places), draw.choice(fields.JUNK))

    def bytes(self, draw: random.Random) -> Iterator[str]:
        """Read a file with some of its bytes changed, before or after it is packed."""
        name, whole = draw.choice(self._files)
        packed = draw.random() < 0.2
        changed = _changed(whole, draw) if not packed or draw.random() < 0.5 else whole
        if packed:
            changed = gzip.compress(changed, 1)
            changed = _changed(changed, draw) if draw.random() < 0.5 else changed
        place = self.folder / "bytes"
        place.mkdir(exist_ok=True)
        (path := place / name).write_bytes(changed)
        yield from _read_any(path, draw)

    def ranks(self, draw: random.Random) -> Iterator[str]:
        """Read a folder of three ranks: snapshots, reports or both, of which one is a mutant."""
        from memprof.advice.analyze_with_advice import ReportBuilder
        from memprof.analysis.ranks.reading import RanksReader, read_ranks

        place = self.folder / "ranks"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for rank in range(3):
            report = pickle.loads(self._plain["report"])
            report["source"] |= {"rank": rank, "world_size": 3}
            if rank == 1 or draw.random() < 0.2:
                mutate(report, draw, "report")
            name = draw.choice(_RANK_NAMES).format(rank=rank)
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(json.dumps(report), encoding="utf-8")
        if draw.random() < 0.2:
            told = pickle.loads(self._plain["report"])
            mutate(told, draw, "report")
            (place / "step-000001.ranks.json").write_text(json.dumps(told), encoding="utf-8")
        if draw.random() < 0.05:
            (place / "step-000001.rank-0.pickle").write_bytes(self.good["snapshot"].read_bytes())
        report = read_ranks([place], RanksReader(ReportBuilder())).report
        yield from _shown(report, draw)

    def settings(self, draw: random.Random) -> Iterator[str]:
        """Read a configuration, a model's config.json, rules or lengths."""
        place = self.folder / "settings"
        place.mkdir(exist_ok=True)
        what = draw.choice(("yaml", "yaml", "json", "bytes", "model", "rules", "lengths"))
        if what in ("rules", "lengths"):
            text = _changed((valid.rules() if what == "rules" else valid.lengths()).encode(), draw)
            (path := place / what).write_bytes(text)
            _READ_SETTINGS[what](path)
            return
        data = self.mutant("model" if what == "model" else "settings", draw)
        (path := place / "config.json").write_text(json.dumps(data), encoding="utf-8")
        if what in ("yaml", "bytes"):
            import yaml  # type: ignore[import-untyped]

            written = yaml.safe_dump(data).encode("utf-8", "surrogatepass")
            path = place / "config.yaml"
            path.write_bytes(_changed(written, draw) if what == "bytes" else written)
        _READ_SETTINGS["model" if what == "model" else "settings"](path)
        yield ""

    def text(self, draw: random.Random) -> Iterator[str]:
        """Explain a log made of out-of-memory texts, with lines, numbers and characters changed."""
        from memprof.reports.renderers import Answer, render

        from memprof.oom.explain import explain_log

        log = "\n".join(draw.choice(self._texts) for _ in range(draw.choice((1, 1, 2, 4))))
        for _ in range(draw.choice((0, 1, 2, 4))):
            log = _bent(log, draw)
        answer = explain_log(log)
        if answer.failures and draw.random() < 0.3:
            yield render(Answer("oom", answer, lambda: answer), draw.choice(("text", "json", "markdown")))


_OTHERS: dict[str, Callable[[Mutants, random.Random], Iterator[str]]] = {
    "fields": Mutants.fields, "answers": Mutants.answers,
    "bytes": Mutants.bytes, "ranks": Mutants.ranks, "settings": Mutants.settings, "text": Mutants.text,
}  # fmt: skip
_RANK_NAMES = (
    *("step-000001.rank-{rank}.json",) * 6,
    "step-000002.rank-{rank}.json", "rank{rank}.json", "actor/rank_{rank}.json", "ref/rank{rank}/x.json",
)  # fmt: skip


# ---- what a mutant must come to --------------------------------------------------------------------------------------


def _read_snapshot(path: Path, draw: random.Random) -> Iterator[str]:
    from memprof.advice.analyze_with_advice import ReportBuilder

    yield from _shown(ReportBuilder()(path), draw)


def _read_report(path: Path, draw: random.Random) -> Iterator[str]:
    from memprof.cli.inputs import known_report

    report = known_report(path)
    if report is not None:
        yield from _shown(report, draw)


def _read_answer(path: Path, draw: random.Random) -> Iterator[str]:
    """Read any answer of memprof's, and draw it if a command draws what it reads."""
    from memprof.reports.document.comparison import build_comparison
    from memprof.reports.renderers import draw as drawn

    from memprof.report import Report
    from memprof.report.base import Model
    from memprof.report.codec import to_json
    from memprof.report.comparison import Comparison
    from memprof.report.files import read_answer
    from memprof.report.plan import Serving

    answer = read_answer(path)
    if not isinstance(answer, Model):
        return
    yield to_json(answer)
    style = draw.choice(("text", "markdown"))
    if isinstance(answer, Report):
        yield from _shown(answer, draw)
    elif isinstance(answer, Comparison):
        yield drawn("compare", build_comparison(answer), style)
    elif isinstance(answer, Serving):
        yield drawn("serving", answer, style)


def _read_comparison(path: Path, draw: random.Random) -> Iterator[str]:
    shape = draw.choice(("text", "markdown")) if draw.random() < 0.125 else "json"
    yield from _answer(["compare", str(path), "--format", shape])


def _read_counters(path: Path, draw: random.Random) -> Iterator[str]:
    from memprof.reports import renderers

    from memprof.analysis.counters import find_counters, read_counters

    found = [read_counters(p) for p in find_counters(path.parent)]
    if draw.random() < 0.25:
        yield renderers.draw("watch", found)


def _read_any(path: Path, draw: random.Random) -> Iterator[str]:
    """Read a file as ``report`` does: a report's JSON, else a snapshot."""
    from memprof.cli.inputs import known_report

    report = known_report(path)
    yield from _shown(report, draw) if report is not None else _read_snapshot(path, draw)


_READERS: dict[str, Callable[[Path, random.Random], Iterator[str]]] = {
    "snapshot": _read_snapshot, "report": _read_report, "compare": _read_comparison, "counters": _read_counters,
}  # fmt: skip


def _shown(report: Report, draw: random.Random) -> Iterator[str]:
    """Check a report against its model, and render one in eight."""
    from memprof.reports.renderers import render

    from memprof.cli.answers import report_answer
    from memprof.errors import InputError
    from memprof.report.codec import parse, to_json

    try:
        parse(to_json(report).encode())
    except InputError as error:
        raise Invalid(str(error)) from None
    if draw.random() < 0.125:
        answer = report_answer("report", report, None)
        yield render(answer, draw.choice(("text", "markdown", "json")))


def _settings_of(path: Path) -> None:
    from memprof.cli.simulation_options import settings_of

    settings_of(path, {})


def _model_of(path: Path) -> None:
    from memprof.config.catalogue import find_config
    from memprof.config.model_shape import ModelShape, positions_of

    config = find_config(str(path))
    ModelShape.of(config).kv_cache_bytes(8, 2)
    positions_of(config)


def _rules_of(path: Path) -> None:
    from memprof.attribution.rules import load_rules

    load_rules(path)


def _lengths_of(path: Path) -> None:
    from memprof.simulate.lengths import read_lengths

    read_lengths(str(path), 512)


_READ_SETTINGS = {"settings": _settings_of, "model": _model_of, "rules": _rules_of, "lengths": _lengths_of}


# ---- changing inputs -------------------------------------------------------------------------------------------------


def mutate(mutant: Any, draw: random.Random, kind: str) -> None:
    top: Any = mutant["memprof"] if kind == "snapshot" and "memprof" in mutant and draw.random() < 0.7 else mutant
    places = _places(top, [])
    if not places:
        return
    holder, key = draw.choice(places)
    way = draw.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1:
        other, there = draw.choice(places)
        holder[key] = copy.deepcopy(other[there])
    elif way == 2 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif way == 3 and type(holder[key]) is int:
        holder[key] = draw.choice((-holder[key], holder[key] * 2**40, float(holder[key]), str(holder[key])))
    else:
        holder[key] = copy.deepcopy(draw.choice(fields.JUNK))


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Add every holder and key below a value to ``found``, and return it."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            _places(inner, found)
    return found


def _changed(data: bytes, draw: random.Random) -> bytes:
    """Change a few bytes: other values, spans left out, doubled, moved or cut off."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        if not changed:
            break
        at = draw.randrange(len(changed))
        span = draw.choice((1, 1, 2, 8, 64))
        way = draw.randrange(7)
        if way < 2:
            changed[at] = draw.choice((0, 1, 0x2E, 0x30, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif way == 2:
            del changed[at : at + span]
        elif way == 3:
            changed[at:at] = changed[at : at + span]
        elif way == 4:
            changed[at:at] = draw.choice(_BYTES)
        elif way == 5:
            other = draw.randrange(len(changed))
            changed[at : at + span] = changed[other : other + span]
        elif draw.random() < 0.3:
            del changed[at:]
    return bytes(changed)


_BYTES = (b"\x1b[31m", b"9" * 30, b"[[[[", b"null", b'"', b"\xe2\x80\xae", b"\r\n", b"NaN")
_PIECES = (
    "\x1b[31m", "\x1b]52;c;AAAA\x07", "\r", "\u202e", "\x00", "GiB", "MiB", "0", "-1", "9" * 25, "nan", "1e400", ".",
    "(", "%", "{", "\ufffd", "│ ", "(WorkerDict pid=1) ", "[rank1]: ", "GPU 0 has a total capacity of ", " is free",
    "…",
)  # fmt: skip


def _bent(text: str, draw: random.Random) -> str:
    """Change a text: a number, a line, a span, a piece from elsewhere."""
    at = draw.randrange(len(text) + 1)
    way = draw.randrange(5)
    if way == 0:
        return text[:at] + draw.choice(_PIECES) + text[at:]
    if way == 1:
        return text[:at] + text[at + draw.choice((1, 3, 20, 200)) :]
    if way == 2:
        lines = text.splitlines(keepends=True)
        lines[draw.randrange(len(lines) or 1) : 0] = [draw.choice(lines)] if lines else []
        return "".join(lines)
    digits = [i for i, c in enumerate(text) if c.isdecimal()]
    if way == 3 and digits:
        at = draw.choice(digits)
        return text[:at] + draw.choice(_PIECES) + text[at + 1 :]
    return draw.choice((f"{text[at:]}{text[:at]}", text.lower(), text.replace("\n", " "), text.replace(" ", "\u00a0")))


# ---- running one -----------------------------------------------------------------------------------------------------


def _call(words: list[str]) -> str:
    from memprof.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main(words, standalone_mode=False)
    return out.getvalue()


def _answer(words: list[str]) -> Iterator[str]:
    """Run one command; hold the JSON that it prints against the schema."""
    from memprof.errors import MemprofError
    from memprof.report.codec import parse

    printed = _call(words)
    yield printed
    if "--json" in words and printed:
        try:
            parse(printed.encode())
        except MemprofError as error:
            raise Invalid(f"{error} of {words[0]}") from None


def _ending(answers: Callable[[], Iterable[str]]) -> str:
    """Run one input; say what is wrong with how it ended."""
    from memprof.errors import MemprofError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if any(mark in printed for printed in answers() for mark in _CONTROL):
                return "a control character came through"
    except (MemprofError, click.ClickException) as error:
        told = str(error)
        return "a sentence of several lines" if "\n" in told else "a sentence with a control character" if any(
            mark in told for mark in _CONTROL
        ) else ""  # fmt: skip
    except Invalid as error:
        where = str(error).rpartition("(at ")[2]
        return f"JSON that its schema refuses, at {''.join(c for c in where if not c.isdigit())}"
    except (Exception, Hang) as error:
        frames = list(reversed(traceback.extract_tb(error.__traceback__)))
        at = next((f for f in frames if "/memprof/" in f.filename or "/reports/" in f.filename), frames[0])
        return f"{type(error).__name__} in {'/'.join(Path(at.filename).parts[-2:])}:{at.lineno} {at.name}"
    return ""


def _outcomes(mutants: Mutants, batch: list[tuple[str, int, bool]]) -> list[tuple[str, int, str]]:
    """Run a batch in a fork; return the findings."""
    place = mutants.folder / "findings"
    place.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _child(mutants, batch, place)
    status = os.waitpid(child, 0)[1]
    found: list[tuple[str, int, str]] = json.loads(place.read_text()) if place.exists() else []
    if status:
        number = int((mutants.folder / "number").read_text() or 0)
        kind, seed, _ = batch[number]
        found.append((kind, seed, f"the process ended with status {status}"))
    return found


def _child(mutants: Mutants, batch: list[tuple[str, int, bool]], place: Path) -> None:
    def late(*_: Any) -> None:
        raise Hang

    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, late)
    found = []
    for number, (kind, seed, command) in enumerate(batch):
        (mutants.folder / "number").write_text(str(number))
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # of this process, however busy the machine is
        signal.alarm(10 * _SECONDS)
        if wrong := mutants.run(kind, seed, command):
            found.append((kind, seed, wrong))
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    place.write_text(json.dumps(found))
    os._exit(0)


def _batches(kinds: Sequence[str], seeds: range, commands: int) -> Iterator[list[tuple[str, int, bool]]]:
    batch = []
    for seed in seeds:
        batch.append((kinds[seed % len(kinds)], seed, random.Random(seed).randrange(commands) == 0))
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


_ONLY = f"Only this kind; may be repeated: {', '.join(KINDS)}."


@click.command(help=__doc__)
@click.option("--inputs", default=2000, show_default=True)
@click.option("--seed", default=0, show_default=True, help="The first input's number.")
@click.option("--only", "only", multiple=True, type=click.Choice(KINDS), metavar="KIND", help=_ONLY)
@click.option("--commands", default=1, type=click.IntRange(1), show_default=True, help="One in N by commands.")
@click.option("--log", type=click.Path(path_type=Path), help="Write findings there as it goes.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the counts there as it goes.")
def main(inputs: int, seed: int, only: tuple[str, ...], commands: int, log: Path | None, path: Path | None) -> None:
    sys.setrecursionlimit(2000)
    found: Counter[str] = Counter()
    shown: dict[str, str] = {}
    tried: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="memprof-mutate-") as folder:
        mutants = Mutants(Path(folder))
        gc.freeze()  # what is imported by now is not looked through again in every fork
        for batch in _batches(only or KINDS, range(seed, seed + inputs), commands):
            tried.update(kind if command or kind not in SEEDS else f"{kind} (functions)" for kind, _, command in batch)
            for kind, number, wrong in _outcomes(mutants, batch):
                found[wrong] += 1
                again = f"--only {kind} --seed {number} --inputs 1 --commands {commands}"
                if shown.setdefault(wrong, again) is again and log is not None:
                    log.open("a").write(f"{wrong}    {again}\n")
            if path is not None:
                told = {"what": "mutated inputs by kind", "sum": tried.total(), "tried": tried, "findings": found}
                path.write_text(json.dumps({**told, "environment": environment()}, indent=2) + "\n", encoding="utf-8")
    for wrong, times in found.most_common():
        click.echo(f"{times:6} {wrong}    {shown[wrong]}")
    click.echo(f"{inputs} inputs ({', '.join(f'{n} {kind}' for kind, n in tried.items())}): {found.total()} findings")
    if found:
        sys.exit(1)


def inputs_table() -> str:
    """Say how many mutated inputs of how many kinds were tried, and what they found."""
    found = read("inputs")
    kinds = len({kind.removesuffix(" (functions)") for kind in found["tried"]})
    return f"{found['sum']:,} inputs of {kinds} kinds. Findings: {sum(found['findings'].values())}.\n"
