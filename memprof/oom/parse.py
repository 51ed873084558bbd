"""Finding out-of-memory messages in a log, in every wording torch has had since 1.x.

The wordings, oldest first, as torch's allocators print them (sizes with two decimals, so each is off by up to half a
hundredth of its unit):

* 1.x to 2.0: ``CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.71 GiB already
  allocated; 5.62 MiB free; 1.00 GiB allowed; 9.78 GiB reserved in total by PyTorch)``; up to 1.3 ``cached`` for
  ``reserved in total by PyTorch``. NPU and other backends outside torch still use it.
* 2.1: ``GPU 0 has a total capacty of`` (sic, ``capacity`` from 2.2) ``14.75 GiB of which 5.06 MiB is free. Process
  123 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has ... Of the allocated memory ... is
  allocated by PyTorch, and ... is reserved by PyTorch but unallocated.``
* 2.4: ``is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and ...``. Those pools
  are in the first figure.
* HIP and XPU say the same about themselves, XPU without the processes.
* MPS: ``MPS backend out of memory (MPS allocated: ..., other allocations: ..., max allowed: ...). Tried to allocate``.
* The CPU: ``DefaultCPUAllocator: can't allocate memory: you tried to allocate N bytes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Failure", "find_failures"]

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# What launchers, Ray, loggers and mail programs put before a line.
_PREFIX = re.compile(
    r"^(?:[ \t]*(?:>+|\|+|\[rank\d+\]:|\[default\d+\]:|\(\w[\w.]* pid=\d+[^)\n]*\)|\d+:(?=[ \t])|#(?=[ \t]))[ \t]?)+",
    re.MULTILINE,
)
_RANK = re.compile(r"\[(?:rank|default)(\d+)\]:?|\brank[ =:](\d+)\b|^(\d+):(?=[ \t])", re.IGNORECASE)
_SIZE = r"(\d{1,20}(?:\.\d{1,9})?|more than 1)\s*(bytes|[KMGTE]i?B|B)\b"
_UNITS: dict[str, int] = {"B": 1, "BYTES": 1, **{f"{p}IB": 1024**i for i, p in enumerate("KMGTPE", 1)}}
_UNITS |= {f"{p}B": _UNITS[f"{p}IB"] for p in "KMGTPE"}  # torch's GB are GiB

_STARTS = (
    ("device", re.compile(r"\b(MPS backend|[A-Z][A-Z0-9]{1,9}) out of memory\b(?=[.(: ]{0,3})")),
    ("driver", re.compile(r"\b(CUDA|HIP) (?:driver )?error: out of memory|\b(cuda|hip)ErrorMemoryAllocation\b")),
    ("library", re.compile(r"\b((?:CUBLAS|CUDNN|HIPBLAS|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED)\b")),
    ("cpu", re.compile(r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)")),
    (
        "host",
        re.compile(r"\bUnable to allocate [^\n]{1,60} for an array\b|^(?:builtins\.)?MemoryError\b", re.M),
    ),
    ("killed", re.compile(r"\b[Oo]ut of memory: Killed process \d+|\bSignal 9 \(SIGKILL\)|\bexitcode\s*: -9\b")),
    ("engine", re.compile(r"No available memory for the cache blocks|less than desired GPU memory utilization")),
)
_WINDOW = 3000
_BEFORE = 40_000
_END = re.compile(r"Traceback \(most recent call last\)|\n\s*\n|\n[\w.]*(?:Error|Exception|Warning):")
_FRAME = re.compile(r'File "([^"\n]{1,400})", line (\d{1,9}), in ([^\n]{1,200})')


@dataclass(frozen=True)
class Failure:
    """One message. Sizes are bytes, None where it does not say.

    ``kind`` is ``device`` (torch's own message), ``driver``, ``library``, ``cpu``, ``host``, ``killed`` or ``engine``;
    ``processes`` are (process id, bytes in use) of those that are not said to be this one; ``frames`` of the
    traceback above it, outermost first.
    """

    kind: str
    backend: str
    line: int
    text: str
    rank: int | None = None
    device: int | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    in_use: int | None = None
    allocated: int | None = None
    private_pools: int | None = None
    unallocated: int | None = None
    reserved: int | None = None
    other: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    frames: tuple[tuple[str, int, str], ...] = field(default=(), repr=False)


def find_failures(log: str) -> list[Failure]:
    """Every message in ``log``, in its order; the same one said twice by one rank counts once."""
    text = _ANSI.sub("", log).replace("\r\n", "\n").replace("\r", "\n")
    found = sorted(_starts(text), key=lambda s: s[0])
    failures: dict[tuple[object, ...], Failure] = {}
    for i, (at, kind, backend) in enumerate(found):
        after = found[i + 1][0] if i + 1 < len(found) else len(text)
        failure = _read(text, at, min(after, at + _WINDOW), kind, backend)
        if failure is not None:
            failures.setdefault((failure.rank, failure.kind, failure.text), failure)
    return _without_echoes(list(failures.values()))


def _starts(text: str) -> Iterator[tuple[int, str, str]]:
    for kind, pattern in _STARTS:
        for match in pattern.finditer(text):
            yield match.start(), kind, next((g for g in match.groups() if g), "")


def _read(text: str, start: int, stop: int, kind: str, backend: str) -> Failure | None:
    window = text[start:stop]
    if (end := _END.search(window)) is not None:
        window = window[: end.start()]
    words = " ".join(_PREFIX.sub("", window).split())
    head = text[text.rfind("\n", 0, start) + 1 : start]
    rank = _RANK.search(head)
    if kind == "device" and "Tried to allocate" not in words and "allocated:" not in words:
        if backend not in ("CUDA", "HIP", "XPU", "MPS backend"):
            return None  # a sentence about memory, not torch's
        words = words[:200]
    elif kind not in ("device", "cpu"):
        words = " ".join(window.splitlines()[0].split())[:300] if window else ""
    words = _to_the_last_number(words)
    return Failure(
        kind, backend.removesuffix(" backend"), text.count("\n", 0, start) + 1, words,
        rank=next((int(g[:6]) for g in rank.groups() if g), None) if rank else None,
        frames=_frames(text[max(0, start - _BEFORE) : start]),
        **_numbers(words),  # type: ignore[arg-type]
    )  # fmt: skip


def _to_the_last_number(words: str) -> str:
    """Without the advice and whatever the log says next."""
    ends = [m.end() for pattern in (*_FIELDS.values(), _PROCESS) for m in pattern.finditer(words)]
    if not ends:
        return words
    stop = words.find(".", max(ends))
    return words[: stop + 1] if 0 <= stop < max(ends) + 60 else words[: max(ends)]


def _numbers(words: str) -> dict[str, object]:
    """The fields of a message on one line."""
    gpu = re.search(r"\b(?:GPU|[A-Z]{2,5}) (\d{1,4})(?: has a total|;)", words)
    numbers: dict[str, object] = {"device": int(gpu.group(1)) if gpu else None}
    for name, pattern in _FIELDS.items():
        match = pattern.search(words)
        numbers[name] = _bytes(match) if match else None
    processes = [(int(m.group(1)), _bytes(m, 2)) for m in _PROCESS.finditer(words)]
    numbers["processes"] = tuple(processes)
    reserved, allocated = numbers["reserved"], numbers["allocated"]
    if isinstance(reserved, int) and isinstance(allocated, int) and numbers["unallocated"] is None:
        numbers["unallocated"] = max(0, reserved - allocated)
    return numbers


_FIELDS = {
    "requested": re.compile(rf"[Tt]ried to allocate {_SIZE}|Unable to allocate {_SIZE}"),
    "total": re.compile(rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity"),
    "free": re.compile(rf"of which {_SIZE} is free|{_SIZE} free[;)]"),
    "allowed": re.compile(rf"{_SIZE} allowed;|max allowed: {_SIZE}"),
    "in_use": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|MPS allocated: {_SIZE}"),
    "private_pools": re.compile(rf"with {_SIZE} allocated in private pools"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{_SIZE} (?:reserved in total by PyTorch|cached)"),
    "other": re.compile(rf"other allocations: {_SIZE}"),
}
_PROCESS = re.compile(rf"\bProcess (\d{{1,10}}) has {_SIZE} memory in use")


def _bytes(match: re.Match[str], first: int = 1) -> int:
    groups = [g for g in match.groups()[first - 1 :] if g is not None]
    number, unit = groups[0], groups[1]
    value = 1.0 if number.startswith("more") else float(number)
    return round(value * _UNITS[unit.upper()])


def _frames(before: str) -> tuple[tuple[str, int, str], ...]:
    """The frames of the last traceback in ``before``."""
    last = before.rfind("Traceback (most recent call last)")
    if last < 0:
        return ()
    rows = [(m.group(1), int(m.group(2)), m.group(3).strip()) for m in _FRAME.finditer(before, last)]
    return tuple(rows[-200:])


def _without_echoes(failures: list[Failure]) -> list[Failure]:
    """A launcher repeats a worker's message without its rank, a wrapped one is cut short: the fuller one stays."""
    kept: list[Failure] = []
    for failure in failures:
        twins = [o for o in failures if o is not failure and o.kind == failure.kind and o.backend == failure.backend]
        fuller = (o for o in twins if o.text.startswith(failure.text.rstrip(" .)")) and _knows(o) > _knows(failure))
        if next(fuller, None) is None:
            kept.append(failure)
    details = {f.rank for f in kept if f.kind == "device"}
    return [f for f in kept if not (f.kind == "killed" and details and f.text.startswith("exitcode"))]


def _knows(failure: Failure) -> int:
    return len(failure.text) + (failure.rank is not None)
