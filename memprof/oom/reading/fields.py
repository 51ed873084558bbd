"""torch's own messages, read field by field, so that a shortened, cut or wrapped one is read as far as it goes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memprof.oom.knowledge_files import typed
from memprof.oom.known_messages import DEVICE_FORMS
from memprof.oom.message_form import Form
from memprof.oom.reading.sizes import SIZE, bytes_of

# No two fields of one message stand further apart, spaces not counted.
_GAP = 260
_HEAD, _BLOCK, _ASYNC, _WARNING, _FIELDS_ONLY, _CLASS = DEVICE_FORMS
#: Forms that begin a message, by the name of the piece they are found as.
_BEGIN = {"head": _HEAD, "block": _BLOCK, "async": _ASYNC, "warning": _WARNING}
_FIELDS, _ALSO = (
    {name: re.compile(words.replace("{size}", f"({SIZE})")) for name, words in rows.items()}
    for rows in (typed("torch", "fields", dict[str, str]), typed("torch", "also", dict[str, str]))
)
_PROCESS, _INDEX = _ALSO["process"], _ALSO["index"]
_SIGNS = typed("torch", "signs", tuple[str, ...])
_END = re.compile(r"traceback\(mostrecentcalllast")
_STRICT = ("total", "allocated", "unallocated", "in_use")
_EXABYTE = 2**60


@dataclass
class Message:
    """A device message: where it stands in the squeezed text, whose it is, and its numbers by field."""

    start: int
    stop: int
    form: Form
    backend: str
    numbers: dict[str, int] = field(default_factory=dict)
    processes: list[tuple[int, int]] = field(default_factory=list)
    device: int | None = None


def messages_in(text: str) -> list[Message]:
    """Return every message of a device allocator in ``text`` (squeezed), in its order."""
    pieces = sorted(_pieces(text), key=lambda piece: (piece[0], -piece[1]))
    found: list[Message] = []
    for start, stop, name, match in pieces:
        last = found[-1] if found else None
        if last is None or _begins_another(last, text, start, name):
            last = Message(start, stop, _FIELDS_ONLY, "")
            found.append(last)
        _take(last, start, stop, name, match)
    for message in found:
        index = _INDEX.search(text, message.start, message.stop + 1)
        message.device = int(index.group(1)) if index else None
    return [message for message in found if _is_message(message)]


def _pieces(text: str) -> list[tuple[int, int, str, re.Match[str]]]:
    """Return heads, fields and processes as (start, stop, name, match)."""
    pieces = []
    for name, form in _BEGIN.items():
        pieces += [(m.start(), m.end(), name, m) for m in form.pattern.finditer(text)]
    if not any(sign in text for sign in _SIGNS):
        return pieces
    for name, pattern in _FIELDS.items():
        pieces += [(m.start(), m.end(), name, m) for m in pattern.finditer(text)]
    return pieces + [(m.start(), m.end(), "process", m) for m in _PROCESS.finditer(text)]


def _begins_another(last: Message, text: str, start: int, name: str) -> bool:
    if start - last.stop > _GAP or _END.search(text, last.stop, start):
        return True
    if name in _BEGIN:
        return True
    return name != "process" and name in last.numbers


def _take(message: Message, start: int, stop: int, name: str, match: re.Match[str]) -> None:
    message.stop = max(message.stop, stop)
    if name in _BEGIN:
        backend = str(match.groupdict().get("backend") or _BEGIN[name].backend)
        message.form, message.backend = _BEGIN[name], backend.upper().replace("MPSBACKEND", "MPS")
    elif name == "process":
        message.processes.append((int(match.group(1)), bytes_of(match.group(2))))
    else:
        size = next(group for group in match.groups() if group)
        message.numbers[name] = _EXABYTE if size.startswith("morethan") else bytes_of(size)


def _is_message(message: Message) -> bool:
    """Say whether the fields are enough to be torch's, where the words *out of memory* are missing."""
    if message.form is not _FIELDS_ONLY:
        return True
    strict = sum(name in message.numbers for name in _STRICT)
    return strict >= 2 or ("requested" in message.numbers and strict + ("free" in message.numbers) >= 1)
