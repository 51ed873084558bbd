"""Run memprof's own commands for an assistant: in a process of their own, on files below the folders that were named.

A command only reads: none here is asked to write a file. It ends with its time limit, and its answer is cut to
what an assistant can take in.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from memprof.errors import InputError, MemprofError, UsageError

_CUT = "\n\n[{left:,} more characters were cut off. {hint}]"
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Above the limit of compare --fail-above, and what does not fit a card: answers, not mistakes.
_ANSWERED = (0, 1, 4)
_READ = (".pickle", ".pkl", ".json", ".gz")
_REDACTED = ("report", "explain", "compare", "oom", "advise")  # a simulation knows no machine and no user


@dataclass(frozen=True)
class Limits:
    """What a command may read (``bytes`` of a file, or of a folder's files together), take, and answer in
    ``characters``."""

    bytes: int = 4 * 2**30
    seconds: float = 300.0
    characters: int = 24_000


class Reader:
    """Run commands on files below ``roots``, and no others. ``redact``: leave out what ``--redact`` leaves out."""

    def __init__(self, roots: Sequence[Path], limits: Limits, redact: bool = False) -> None:
        self.roots = [root.resolve() for root in roots]
        self.limits = limits
        self.redact = redact

    def path(self, text: str) -> str:
        """Return the path of a file or folder that may be read, links followed; InputError where it is not below the
        folders named, is neither a file nor a folder, or is too large."""
        try:
            path = (Path(text) if Path(text).is_absolute() else self.roots[0] / text).resolve(strict=True)
            mode = path.stat().st_mode
        except (OSError, ValueError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"{text!r:.200} cannot be read ({reason}).") from None
        if not all(self._allowed(place) for place in _led_to(path)):
            named = ", ".join(map(str, self.roots))
            raise InputError(f"{text!r:.200} is outside the folders this server may read: {named}.")
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InputError(f"{text!r:.200} is neither a file nor a folder.")
        self._check_size(path)
        return str(path)

    def _allowed(self, path: Path) -> bool:
        return any(path == root or root in path.parents for root in self.roots)

    def _check_size(self, path: Path) -> None:
        files = [path] if path.is_file() else [Path(at, name) for at, _, names in os.walk(path) for name in names]
        size = 0
        for file in files:
            if path.is_dir() and not file.name.endswith(_READ):
                continue
            size += file.lstat().st_size
            if size > self.limits.bytes:
                limit = self.limits.bytes / 2**30
                raise InputError(f"{path} is larger than the {limit:.2f} GiB this server reads; use the command line.")

    async def run(self, *arguments: str, text: str | None = None, hint: str = "") -> str:
        """Run ``memprof ARGUMENTS`` and return what it prints, cut to the limit.

        ``text`` is what it reads from standard input, ``hint`` says how to ask for less, where the answer is cut.

        Raises:
            MemprofError: the command's own sentence, or that it took too long.
        """
        limit = self.limits.seconds
        command, *rest = arguments
        hidden = ["--redact"] if self.redact and command in _REDACTED else []
        try:
            with anyio.fail_after(limit):
                done = await anyio.run_process(
                    [sys.executable, "-m", "memprof", command, *hidden, *rest],
                    input=(text or "").encode("utf-8", "replace"),
                    check=False,
                    env=_environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
        except TimeoutError:
            raise InputError(f"memprof {arguments[0]} took longer than {limit:.0f} s and was ended.") from None
        except (OSError, ValueError) as error:  # a NUL, or more than the system takes
            raise InputError(f"memprof {command} cannot be run on these arguments ({error}).") from None
        said = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode not in _ANSWERED or (done.returncode == 1 and not done.stdout):
            raise _error(done.returncode, said, arguments[0])
        answer = done.stdout.decode("utf-8", "replace").strip()
        if done.returncode:
            answer += f"\n\n{said.splitlines()[-1]}" if said else f"\n\nexit code {done.returncode}"
        return self.cut(answer, hint)

    def cut(self, answer: str, hint: str = "") -> str:
        """Return as much of an answer as the limit allows, whole lines, and say what is missing."""
        if len(answer) <= self.limits.characters:
            return answer
        kept = answer[: self.limits.characters].rpartition("\n")[0] or answer[: self.limits.characters]
        return kept + _CUT.format(left=len(answer) - len(kept), hint=hint).replace(" ]", "]")


def _led_to(folder: Path) -> Iterator[Path]:
    """Yield what a command would follow out of a folder: its ``_memprof`` (``_memprof-2`` ...), linked recordings."""
    for place in (folder, *folder.glob("_memprof*")):
        links = (path for kind in _READ for path in place.glob(f"*{kind}") if path.is_symlink())
        yield from (Path(os.path.realpath(path)) for path in (place, *links))


def _error(code: int, said: str, command: str) -> MemprofError:
    last = (
        said.splitlines()[-1].removeprefix("memprof: ") if said else f"memprof {command} ended with exit code {code}."
    )
    return UsageError(last) if code == UsageError.exit_code else InputError(last)


def _environment() -> dict[str, str]:
    """Return the environment without a launcher's variables: a command must not join somebody's run as a rank."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**kept, "PYTHONPATH": paths, "PYTHONUTF8": "1", "NO_COLOR": "1"}
