"""What is known of one failure: facts by name, each with the line of the text that shows it.

Causes, remedies and answers are conditions over these facts (``knowledge/*.toml``): the names of facts that must hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING

from memprof.allocator.settings import AllocatorSettings, settings_of
from memprof.oom.derived import BY_NUMBERS, SIZES, VALUES
from memprof.oom.framework_settings import PLAIN, Names
from memprof.oom.knowledge_files import FactRule, KnowledgeRule, facts_file
from memprof.oom.reading.sizes import bytes_of
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.oom.arithmetic import Parts
    from memprof.oom.failure import Failure, TracebackFrame
    from memprof.report.oom import TextFact

Value = str | int | float | bool | None

_NEAR, _INNER = 12, 6
_LONGEST_CODE = 90


class FailureFacts:
    """Answer what is known of a failure by name; every answer is worked out when it is first asked for."""

    def __init__(self, values: Mapping[str, Value], failure: Failure | None = None, around: str = "") -> None:
        """Take what is known.

        Args:
            values: numbers (bytes), texts and flags by name.
            failure: whose frames, message and surroundings are searched; None for a recording.
            around: what stands in place of a text around the message.
        """
        self.given = dict(values)
        self._values: dict[str, Value] = {name: value for name, value in values.items() if value is not None}
        self._holds: dict[str, bool] = {}
        self._lines: dict[str, int | None] = {}
        self.frames: Sequence[TracebackFrame] = failure.frames if failure else ()
        self._message = failure.text if failure else ""
        self._around = [_without_proposals(around)]
        self._numbers: Sequence[int] = ()
        self._line = failure.line if failure else None
        if failure:
            self._around = [_without_proposals(failure.around), _without_proposals(failure.head)]
            self._numbers = failure.around_lines

    def value(self, name: str) -> Value:
        """Return a value by name, None if it is unknown."""
        if name not in self._values:
            self._values[name] = None  # while it is worked out: a name that asks for itself is unknown
            self._values[name] = self._worked_out(name)
        return self._values[name]

    def text(self, name: str) -> str | None:
        """Return a value as text, None if it is unknown."""
        return None if (value := self.value(name)) is None else str(value)

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self.value(name)
        return float(value) if isinstance(value, int | float) else math.nan

    def or_0(self, *names: str) -> float:
        """Return the first of these numbers that is known and not 0, else 0."""
        return next((n for n in (getattr(self, name) for name in names) if n and n == n), 0.0)

    def _worked_out(self, name: str) -> Value:
        rules = facts_file()
        pattern = rules.capture.get(name) or rules.number.get(name) or rules.size.get(name)
        if pattern:
            match = next((m for text in (*self._around, self._message) if (m := _search(pattern, text))), None)
            if match is None or name in rules.capture:
                return match and match[1]
            found = next(filter(None, match.groups()))
            return bytes_of(found.lower()) if name in rules.size else float(found)
        if name not in VALUES:
            return None
        try:
            value = VALUES[name](self)
        except (ValueError, ZeroDivisionError, OverflowError):  # of a number that is unknown
            return None
        return None if isinstance(value, float) and math.isnan(value) else value

    def has(self, name: str) -> bool:
        """Say whether a fact holds: ``serving``, ``asked`` (known), ``backend:HIP``, or none of these with ``!``."""
        if name.startswith("!"):
            return not self.has(name[1:])
        if name not in self._holds:
            self._holds[name] = False  # while it is worked out: a fact that asks for itself does not hold
            self._holds[name] = self._found(name)
        return self._holds[name]

    def holds(self, rule: KnowledgeRule) -> bool:
        """Say whether all of ``when``, one of ``any`` (if there are any) and none of ``unless`` hold."""
        if not all(map(self.has, rule.when)) or any(map(self.has, rule.unless)):
            return False
        return not rule.any or any(map(self.has, rule.any))

    def decide(self, cause: str, reason: str) -> None:
        """Take note of the verdict: facts and values may depend on it."""
        self.given.update(cause=cause, reason=reason)
        self._values = {name: value for name, value in self.given.items() if value is not None}
        self._holds.clear()

    def _found(self, name: str) -> bool:
        key, _, wanted = name.partition(":")
        if wanted:
            return self.text(key) == wanted
        if name in self._values:
            return self._values[name] not in (None, False, "")
        rules = facts_file()
        if name in rules.fact:
            return self._rule_holds(name, rules.fact[name])
        if name in rules.setting:
            return self._searched(name, f"(?i){rules.setting[name]}", self._around)
        if name in BY_NUMBERS:
            return BY_NUMBERS[name](self)
        return self.value(name) not in (None, False, "")

    def _rule_holds(self, name: str, rule: FactRule) -> bool:
        if not all(map(self.has, rule.all)) or any(map(self.has, rule.unless)):
            return False
        places = [f"/{frame.path}:{frame.function}" for frame in self.frames]  # a relative path is a folder too
        around = self._around
        searched = {
            "frames": (rule.frames, places),
            "near": (rule.near, places[-_NEAR:]),
            "inner": (rule.inner, [place.rpartition("/")[2] for place in places[-_INNER:]]),
            "last": (rule.last, places[-1:]),
            "code": (rule.code, [frame.code for frame in self.frames[-1:]]),
            "message": (rule.message, [self._message]),
            "around": (f"(?i){rule.around}" if rule.around else "", around),
            "log": (rule.log, [self._message, *around]),
            "text": (rule.text, [self._message, *places, *around]),
        }
        patterns = [(pattern, texts) for pattern, texts in searched.values() if pattern]
        found = any(self._searched(name, pattern, texts) for pattern, texts in patterns) or any(map(self.has, rule.any))
        return found or (bool(rule.all) and not patterns and not rule.any)

    def _searched(self, name: str, pattern: str, texts: Sequence[str]) -> bool:
        for text in texts:
            if (match := _search(pattern, text)) is not None:
                self._lines[name] = self._line_of(text, match.start())
                return True
        return False

    def _line_of(self, text: str, position: int) -> int | None:
        """Return the line of the log that a position of one of the texts stands in; the failure's for its message."""
        index = text.count("\n", 0, position)
        if text is self._around[0]:
            return self._numbers[index] if index < len(self._numbers) else self._line
        return index + 1 if text is self._around[-1] else self._line

    def code_line(self, pattern: str) -> str | None:
        """Return the innermost frame's line of code if the pattern is found there, shortened."""
        code = self.frames[-1].code if self.frames else ""
        return code.strip()[:_LONGEST_CODE] if code and re.search(pattern, code) else None

    def largest(self, *tables: str) -> tuple[float, str, str]:
        """Return size (bytes), name and pid of the largest process in these tables of ``facts.toml``."""
        return max((row for table in tables for row in _rows(table, self._around[0])), default=(math.nan, "", ""))

    def sizes(self) -> dict[str, int]:
        """Return the sizes that the lines around the message give, by the names of ``facts.toml``."""
        names = (*facts_file().size, "largest_row", "users", "smi_size", "mlx_peak", "host_size")
        return {name: round(getattr(self, name)) for name in names if self.value(name) is not None}

    def listed(self) -> Iterator[TextFact]:
        """Yield every fact that holds and every value that is known, with its line."""
        from memprof.report.oom import TextFact

        rules = facts_file()
        for name, value in self.given.items():
            if value not in (None, False, "") and not name.startswith("setting_"):
                size = name in SIZES and isinstance(value, int | float)
                said = format_bytes(int(value)) if size else str(value)
                yield TextFact(name=name, says="of the message", value=said, line=self._line)
        for name in [*rules.fact, *rules.setting, *BY_NUMBERS]:
            if self.has(name):
                says = "on already" if name in rules.setting else "by the numbers"
                says = (rules.fact[name].says or "by other facts") if name in rules.fact else says
                yield TextFact(name=name, says=says, value="yes", line=self._lines.get(name))


@lru_cache(maxsize=4096)
def _search(pattern: str, text: str) -> re.Match[str] | None:
    return re.search(pattern, text)


@lru_cache(maxsize=64)
def _rows(table: str, text: str) -> tuple[tuple[float, str, str], ...]:
    """Return size (bytes), name and pid of each row of a table in a text; several facts ask for one table."""
    kind = facts_file().table[table]
    rows = [(row["size"].lower(), row["name"].strip(), row["pid"]) for row in re.finditer(kind.row, text)]
    return tuple((bytes_of(n) if n[-1].isalpha() else kind.unit * float(n), name, pid) for n, name, pid in rows)


@lru_cache(maxsize=64)
def _without_proposals(text: str) -> str:
    return re.sub(facts_file().pattern["proposed"], lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def facts_of(failure: Failure, parts: Parts, phase: str | None, names: Names) -> FailureFacts:
    """Return what is known of a failure: its numbers, whose run it was, and what its texts show."""
    words = {f"setting_{word}": text for word, text in {**PLAIN.words, **names.words}.items()}
    if names.framework:  # another framework's words would be foreign to it
        own = {f"setting_{word}" for word in (*names.words, "micro_batch", "checkpointing", "optimizer", "offload")}
        words = {key: text for key, text in words.items() if key in own}
    places = "\n".join(f"{frame.path}:{frame.function}" for frame in failure.frames)
    version = next((v for text in (places, failure.text, failure.around, failure.head) if (v := _version(text))), None)
    oldest = _oldest_wording(failure)
    surroundings = _without_proposals(f"{failure.head}\n{failure.around}")
    numbers = _numbers(failure, parts, _allocator_in(surroundings))
    if failure.kind != "device":
        numbers.update({name: failure.facts[name] for name in ("total", "free") if name in failure.facts})
    own_pid, own_actor = _of_this_run(parts, surroundings)
    told: dict[str, Value] = {
        "own_pid": own_pid, "own_actor": own_actor,
        "form": failure.form.id, "kind": failure.kind, "program": failure.form.program, "backend": failure.backend,
        "phase": phase, "rank": failure.rank, "framework": names.framework or None,
        "framework_kind": names.kind if names.framework else None, "engine_sleeps": names.sleeps, "torch": version,
        "torch_at_most": version or oldest,
    }  # fmt: skip
    defaults = dict.fromkeys(names.on, True)  # settings that the framework has on unless told otherwise
    facts = FailureFacts({**failure.facts, **numbers, **words, **told, **defaults}, failure)
    if names.framework or facts.has("training"):
        return facts
    return FailureFacts({**facts.given, "setting_micro_batch": PLAIN.words["batch"]}, failure)


def _of_this_run(parts: Parts, text: str) -> tuple[str | None, str | None]:
    """Return the first of the other processes that the log names before its lines, ``(EngineCore_DP0 pid=77)``."""
    for pid, _ in parts.processes:
        if (match := re.search(facts_file().pattern["named_process"] % pid, text)) is not None:
            return str(pid), match[1]
    return None, None


def _allocator_in(text: str) -> AllocatorSettings:
    """Return the allocator's settings that a log shows; torch's defaults if it shows none."""
    found: dict[str, str] = {}
    for match in re.finditer(facts_file().pattern["allocator"], text):
        found.setdefault(match[1], match["quoted"] or match["plain"] or "")
    return settings_of(found)


def _numbers(failure: Failure, parts: Parts, allocator: AllocatorSettings) -> dict[str, Value]:
    from memprof.oom.arithmetic import free_bytes, missing_bytes

    asked, allocated = failure.requested, parts.allocated
    return {
        **{k: v for k, v in asdict(parts).items() if k not in ("processes", "contradictions", "own_process")},
        **{name: getattr(failure, name) for name in ("total", "allowed", "other", "private_pools")},
        "asked": asked,
        "free": free_bytes(failure),
        "missing": missing_bytes(failure),
        "idle": parts.cached or 0,
        "live": None if not failure.total or allocated is None else allocated / failure.total,
        "piece": None if asked is None else allocator.segment_size(allocator.round_size(asked)),
        "processes": len(parts.processes),
        "silent": sum(not held for _, held in parts.processes),
        "pid": parts.processes[0][0] if len(parts.processes) == 1 else failure.facts.get("pid"),
    }


def _version(text: str) -> int | None:
    match = _search(facts_file().pattern["torch"], text)
    return int(match[1]) * 100 + int(match[2]) if match else None


def _oldest_wording(failure: Failure) -> int | None:
    """Return the newest version that can word it so; None where any can."""
    if failure.backend not in ("CUDA", "HIP"):
        return None
    text = failure.text.lower()
    if "already allocated" in text:
        return 103 if "cached" in text else 200
    return 201 if "capacty" in text else None
