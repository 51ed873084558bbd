"""Raise an exception in every function of memprof's that a small GRPO run calls, one function at a time.

    python -m benchmarks.faults inject [--every 1] [--offset 0] [--exceptions 1] [--keep FILE] [--json FILE]

One process imports and prepares. A fork of it trains up to just before a function is first called, and each injection
is a fork from there, which trains to the end of two steps. The training's losses and
parameters must be those of a run without a callback, to the bit, and something must be said: a warning, a line on
stderr or a note in what was written. Where a shortcut fails that another reader stands behind, nothing need be said if
nothing is lost: the report is the one that is made of the same snapshot without the injection. Functions that *are*
the guard (``memprof/recording/guard.py``) and the dispatch mode's entry cannot stand behind it, and are left out.

With ``--keep`` each outcome is a line of that file, and what stands there is not tried again. Exit code 1: something
broke, was silent, or more than a fifth of the injections were not reached.
"""

from __future__ import annotations

import errno
import functools
import gc
import hashlib
import inspect
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result
from benchmarks.tabling import read
from memprof.recording.guard import FailureGuard

# What may go wrong anywhere.
EXCEPTIONS: tuple[Callable[[], Exception], ...] = (
    lambda: MemoryError("injected"),
    lambda: OSError(errno.ENOSPC, "No space left on device (injected)"),
    lambda: AssertionError("injected"),
    lambda: KeyError("injected"),
    lambda: RuntimeError("injected"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "injected"),
)
# What torch calls without the guard (it holds its own ``try``), and the import, before any run.
_ENTRIES = ("dispatch_mode.py:Watching.__torch_dispatch__", "memprof/__init__.py:__getattr__")
# Shortcuts: the Python reader stands behind the scanner in C, and reads the same.
_SHORTCUTS = ("memprof/_native/", "memprof/snapshot/rows.py:", "memprof/snapshot/packed.py:")
_SECONDS = 240
# A function, and which of the exceptions it is to raise.
Job = tuple[types.CodeType, int]
_CHECKOUT = Path(__file__).resolve().parents[2]
# The functions that stubs are put into, and the caches of memprof's: known before the collector is told to pass over.
functions: list[types.FunctionType] = []
caches: list[Any] = []
VERDICTS = ("warned", "whole", "not called", "broken", "silent")
# What a stub raises, and how often it did: set in the child that runs it.
raises: Callable[[], Exception] = EXCEPTIONS[0]
fired = 0


def raise_injected() -> None:
    """Called by every stub."""
    global fired
    fired += 1
    raise raises()


@dataclass(frozen=True)
class Outcome:
    """What one injection came to: ``equal``, ``said`` and the text, whether the stub ran, and whether a shortcut's
    failure left the report ``whole``."""

    function: str
    exception: str
    fired: int
    equal: bool
    said: bool
    text: str
    whole: bool = False

    @property
    def verdict(self) -> str:
        """Return one of :data:`VERDICTS`; ``not called``: it runs once a process, as a module is imported."""
        if not self.equal:
            return "broken"
        return "not called" if not self.fired else "warned" if self.said else "whole" if self.whole else "silent"


def train(folder: Path, callbacks: list[Any]) -> str:
    """Train a tiny model for two steps; return a digest of losses and parameters."""
    from tests.integrations.runs import grpo

    trainer = grpo(folder / "model", folder / "out", callbacks, max_steps=2, max_completion_length=3, questions=8)
    trainer.train()
    digest = hashlib.sha256(repr([row.get("loss") for row in trainer.state.log_history]).encode())
    for _, parameter in sorted(trainer.model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def prepare(folder: Path) -> None:
    """Make the tiny model that every run trains."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.integrations.runs import tokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    words = tokenizer()
    ids = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(words), num_key_value_heads=1, tie_word_embeddings=True, **small, **ids)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")


def watched(folder: Path, report: bool = True) -> list[Any]:
    """Return the callback that is broken: it records the first step, on the CPU, and reports (most of the time)."""
    return [_callback()(folder / "out" / "_memprof", steps=[1], report=report)]


@functools.cache
def _callback() -> Any:
    """Import it once, before any run: an import statement that fails is its reader's to see."""
    from memprof import MemProfCallback

    return MemProfCallback


def name_of(code: types.CodeType) -> str:
    """Return a function's file below the checkout, whatever that is called, and its qualified name."""
    file = Path(os.path.relpath(code.co_filename, _CHECKOUT)).as_posix()
    return f"{file}:{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"


def gate(at: Callable[[int], None]) -> Any:
    """Return a callback that calls ``at`` before each of our own's events: 1, 2 as a step begins, 3 at the end."""
    from transformers import TrainerCallback

    class Gate(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at(1 + state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at(3)

    return Gate()


def called(folder: Path, report: bool = True) -> dict[types.CodeType, int]:
    """Return the code of memprof's functions that a watched run calls, each with the last gate before it does."""
    import memprof.integrations
    import memprof.reports

    import memprof

    packages = (memprof, memprof.integrations, memprof.reports)
    folders = tuple(str(Path(m.__file__ or "").parent) + os.sep for m in packages)
    seen: dict[types.CodeType, int] = {}
    passed = [0]

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code, passed[-1])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        train(folder, [gate(passed.append), *watched(folder, report)])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    functions = [c for c in seen if c.co_flags & inspect.CO_OPTIMIZED]  # a class's body is none
    ours = [c for c in functions if c.co_filename.startswith(folders) and not c.co_name.startswith("<")]
    guards = ("recording/guard.py",)
    return {c: seen[c] for c in ours if not name_of(c).endswith(_ENTRIES) and not c.co_filename.endswith(guards)}


@dataclass(frozen=True)
class Way:
    """What a run has to do for a function to be called: nothing above what it needs, since most runs are many."""

    report: bool
    cold: bool
    gate: int


def ways(folder: Path) -> dict[types.CodeType, Way]:
    """Return memprof's functions that a run calls in the order of their names, each with the cheapest run that does."""
    every = called(folder)  # the first run fills the caches
    without, warm = called(folder, report=False), called(folder)
    gates = every | warm | without
    names = sorted(gates, key=name_of)
    return {c: Way(c not in without, c not in without | warm, gates[c]) for c in names}


def stub(code: types.CodeType) -> types.CodeType:
    """Return code that raises, for the place of ``code``."""
    source = "def f(*a, **k):\n    from benchmarks.faults.inject import raise_injected\n    raise_injected()\n"
    space: dict[str, Any] = {}
    exec(source, space)
    raising: types.CodeType = space["f"].__code__
    return raising.replace(co_freevars=code.co_freevars, co_name=code.co_name)


def replace(code: types.CodeType) -> int:
    """Put the stub in the place of a function wherever it lives: in functions, and in code that makes closures."""
    raising, count = stub(code), 0
    for outer in functions + [o for o in gc.get_objects() if type(o) is types.FunctionType]:
        if outer.__code__.co_filename == code.co_filename:
            changed = raising if outer.__code__ is code else _with_stub(outer.__code__, code, raising)
            count += changed is not outer.__code__
            outer.__code__ = changed
    return count


def _with_stub(outer: types.CodeType, code: types.CodeType, raising: types.CodeType) -> types.CodeType:
    constants = []
    for constant in outer.co_consts:
        if constant is code:
            constants.append(raising)
        elif isinstance(constant, types.CodeType):
            constants.append(_with_stub(constant, code, raising))
        else:
            constants.append(constant)
    same = all(a is b for a, b in zip(constants, outer.co_consts, strict=True))
    return outer if same else outer.replace(co_consts=tuple(constants))


def inject(jobs: list[Job], way: Way, folder: Path, expected: str) -> Iterator[Outcome]:
    """Run injections that take the same way: a fork trains up to their gate, and forks each from there."""
    own = Path(tempfile.mkdtemp(prefix="inject-", dir=folder))
    os.symlink(folder / "model", own / "model")
    reading, writing = os.pipe()
    group = os.fork()
    if not group:
        os.setsid()
        os.close(reading)
        _train_to_the_gate(own, jobs, way, expected, writing)
    os.close(writing)
    told = 0
    with os.fdopen(reading, encoding="utf-8") as lines:
        for line in lines:
            told += 1
            yield Outcome(**json.loads(line))
    os.waitpid(group, 0)
    assert told == len(jobs), f"{len(jobs) - told} injections at gate {way.gate} were not made: {_text(own)}"
    shutil.rmtree(own, ignore_errors=True)


def _train_to_the_gate(own: Path, jobs: list[Job], way: Way, expected: str, tell: int) -> None:
    """Train to the gate and run each injection from there; in the child of one, to the end, write what came, end."""
    import benchmarks.faults.inject as module

    found: dict[str, Any] = {"fired": 0, "digest": ""}

    def at(number: int) -> None:
        if number != way.gate:
            return
        before = _files(own / "out")
        for code, exception in jobs:
            child = os.fork()
            if not child:
                os.setsid()
                _print_to(own)
                caught.clear()
                module.raises, module.fired = EXCEPTIONS[exception], 0
                replace(code)
                for cache in caches if way.cold else ():
                    cache.cache_clear()
                return
            _wait(child)
            os.write(tell, (json.dumps(asdict(_outcome(own, code, exception, expected))) + "\n").encode())
            _restore(own / "out", before)
        os._exit(0)

    try:
        _print_to(own)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            at(0)
            found["digest"] = train(own, [gate(at), *watched(own, way.report)])
        found["warnings"] = "\n".join(str(w.message) for w in caught if "memprof" in str(w.message))
    except BaseException as error:
        found["error"] = repr(error)
    finally:
        found["fired"] = module.fired
        (own / "outcome").write_bytes(pickle.dumps(found))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _print_to(own: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(own / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def _wait(child: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.01)


def _files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _restore(folder: Path, before: dict[Path, bytes]) -> None:
    """Make a folder's files what they were, in place: a file that is being appended to stays open."""
    for path in [p for p in folder.rglob("*") if p.is_file() and p not in before]:
        path.unlink()
    for path, data in before.items():
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def _outcome(own: Path, code: types.CodeType, exception: int, expected: str) -> Outcome:
    try:
        found: dict[str, Any] = pickle.loads((own / "outcome").read_bytes())
        (own / "outcome").unlink()
    except (OSError, EOFError):
        found = {"digest": "the process ended or hung", "fired": 1}
    text = _text(own)
    whole = name_of(code).startswith(_SHORTCUTS) and _whole(own / "out" / "_memprof")
    said = "injected" in text or "memprof" in found.get("warnings", "")
    kind = type(EXCEPTIONS[exception]()).__name__
    told = found.get("error", "") or found.get("warnings", "") or text
    return Outcome(name_of(code), kind, found["fired"], found["digest"] == expected, said, told, whole)


def _whole(written: Path) -> bool:
    """Tell whether the reports are those that the snapshots beside them give now."""
    from memprof.advice.analyze_with_advice import ReportBuilder
    from memprof.report.codec import to_json

    snapshots = list(written.glob("*.pickle"))
    for path in snapshots:
        now = json.loads(to_json(ReportBuilder()(path)))
        del now["source"]["file_bytes"]  # known once the file is there
        if not path.with_suffix(".json").exists() or json.loads(path.with_suffix(".json").read_text()) != now:
            return False
    return bool(snapshots)


def _text(own: Path) -> str:
    """Return what the run printed, and the notes in what it wrote."""
    from memprof import load_snapshot

    texts = [p.read_text(errors="replace") for p in (own / "stderr", own / "stdout") if p.exists()]
    for written in (own / "out" / "_memprof").glob("*.json"):
        texts.append(" ".join(json.loads(written.read_text()).get("notes", [])))
    for written in (own / "out" / "_memprof").glob("*.pickle"):
        texts.append(" ".join(load_snapshot(written).run.notes))
    return "\n".join(texts)


def chosen(codes: list[types.CodeType], every: int, offset: int, exceptions: int) -> Iterator[list[Job]]:
    """Yield every so many functions with one of the six each, in turn; then with the next."""
    for further in range(exceptions):
        yield [(code, (number + further) % len(EXCEPTIONS)) for number, code in enumerate(codes[offset::every])]


def injections(
    folder: Path,
    every: int = 1,
    offset: int = 0,
    exceptions: int = 1,
    sample: int | None = None,
    done: Container[tuple[str, str]] = (),
) -> Iterator[Outcome]:
    """Prepare, and yield the outcome of each injection that is not ``done``."""
    prepare(folder)
    FailureGuard.leave = _nothing  # type: ignore[method-assign]  # a fork made here stands for the run, and is no child of it
    _callback()
    expected = train(folder, [])
    known = ways(folder)
    assert train(folder, watched(folder)) == expected, "watching alone changes the run"
    every = max(1, len(known) // sample) if sample else every
    gc.collect()
    objects = gc.get_objects()
    functions[:] = [o for o in objects if type(o) is types.FunctionType]
    cached = [o for o in objects if isinstance(o, functools._lru_cache_wrapper)]
    caches[:] = [o for o in cached if getattr(getattr(o, "__wrapped__", None), "__code__", None) in known]
    del objects, cached
    gc.freeze()  # a fork's collections, which training asks for, look through what is new alone: a third of the time
    for round_of in chosen(list(known), every, offset, exceptions):
        left = [j for j in round_of if (name_of(j[0]), type(EXCEPTIONS[j[1]]()).__name__) not in done]
        for way in dict.fromkeys(known[code] for code, _ in left):
            yield from inject([j for j in left if known[j[0]] == way], way, folder, expected)


@click.command(help=__doc__)
@click.option("--every", default=1, show_default=True, help="Take every so many functions.")
@click.option("--offset", default=0, show_default=True)
@click.option("--sample", type=int, help="So many functions, evenly spread, instead.")
@click.option("--exceptions", default=1, show_default=True, help="How many of the six for each function.")
@click.option("--keep", type=click.Path(path_type=Path), help="Write each outcome there; go on with what it lacks.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(every: int, offset: int, sample: int | None, exceptions: int, keep: Path | None, path: Path | None) -> None:
    kept = keep.read_text(encoding="utf-8").splitlines() if keep is not None and keep.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in kept]
    done = {(o.function, o.exception) for o in outcomes}
    with tempfile.TemporaryDirectory(prefix="memprof-inject-") as folder:
        for outcome in injections(Path(folder), every, offset, exceptions, sample, done):
            outcomes.append(outcome)
            if keep is not None:
                keep.open("a", encoding="utf-8").write(json.dumps(asdict(outcome)) + "\n")
    for outcome in outcomes:
        if outcome.verdict in ("broken", "silent", "not called"):
            print(f"{outcome.verdict}: {outcome.function} {outcome.exception}: {outcome.text[-300:].strip()}")
    found = summary(outcomes)
    write_result({"what": "injections by what came of them", **found}, path)
    sys.exit(bool(found["broken"] or found["silent"] or found["not called"] * 5 > len(outcomes)))


def _nothing(guard: FailureGuard) -> None:
    return


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Count what came of the injections, of each exception too."""
    counts = {
        kind: Counter(o.verdict for o in outcomes if o.exception == kind) for kind in {o.exception for o in outcomes}
    }
    rows = {kind: {verdict: counts[kind][verdict] for verdict in VERDICTS} for kind in sorted(counts)}
    totals = {verdict: sum(row[verdict] for row in rows.values()) for verdict in VERDICTS}
    return {"functions": len({o.function for o in outcomes}), **totals, "exceptions": rows}


def injections_table() -> str:
    """Sum up the injections and what came of them."""
    found = read("injections")
    order = ("warned", "whole", "not called", "broken", "silent")
    return (
        f"{sum(found[key] for key in order):,} injections of {len(found['exceptions'])} exceptions: "
        f"{found['warned']:,} warned, {found['whole']} lost a shortcut and nothing else,\n"
        f"{found['not called']} were not reached, {found['broken']} were broken, {found['silent']} silent.\n"
    )
