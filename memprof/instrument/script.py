"""A script or module run as ``__main__``, so that it cannot tell: its argv, path, exit code, signals, tracebacks.

What is done here is what ``python script.py`` and ``python -m module`` do, in this process: launchers
(``torchrun``, ``accelerate launch``) have started it and watch its process id.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from memprof.compat import require
from memprof.compat.optional_packages import MAIN_DETAILS, MODULE_DETAILS
from memprof.errors import InputError
from memprof.files import refuse_special
from memprof.frame_paths import own_folders

_OPEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # python <(...), where somebody writes
_OURS = tuple(folder for folder, _ in own_folders())


@dataclass(frozen=True)
class Script:
    """Name what to run: a file (or a folder or archive with a ``__main__.py``), or a module."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def named(cls, name: str, arguments: tuple[str, ...], is_module: bool) -> Script:
        """Return a script by what was typed: a path, a module, or a Python command of this environment (``trl``)."""
        if not is_module and os.sep not in name and not os.path.exists(name):
            found = shutil.which(name, path=os.path.dirname(sys.executable))
            if found is not None and _is_python(found):
                name = found
        return cls(name, arguments, is_module)

    def check(self) -> None:
        """Refuse, before anything is set up, what is not there, what would be waited for (a pipe, a socket or a device
        that this process has not open), and a Python that lacks what it takes."""
        require("run")
        if not self.is_module and not os.path.exists(self.name):
            raise InputError(
                f"{self.name}: there is no such script, nor a Python command of this environment; "
                "`memprof run -m NAME` runs a module."
            )
        if not self.is_module and not os.path.abspath(self.name).startswith(_OPEN):
            refuse_special(Path(self.name))

    def run(self, before: Callable[[], None], after: Callable[[BaseException | None], None]) -> NoReturn:
        """Run it to its end, and end this process as it would have ended.

        ``before`` is called when argv and path are the script's, ``after`` with the exception that ended it, its
        traceback printed.
        """
        ending: BaseException | None = None
        main = ModuleType("__main__")
        before_us = sys.modules.get("__main__")  # kept: its globals are cleared when it goes
        try:
            code = self._load(main)
            sys.modules["__main__"] = main
            before()
            exec(code, main.__dict__)
        except SystemExit as error:
            _guarded(after, None)
            raise error.with_traceback(None) from None
        except BaseException as error:
            ending = error
        if ending is None:
            _guarded(after, None)
            del before_us
            sys.exit(0)
        try:
            _show(ending)
        finally:
            _guarded(after, ending)
        if isinstance(ending, KeyboardInterrupt):
            # Unhandled, it makes Python end by the signal itself, which shells and launchers look at.
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt
        sys.exit(1)

    def _load(self, main: ModuleType) -> CodeType:
        spec: ModuleSpec | None = None
        if self.is_module:
            self._set_path(os.getcwd())
            sys.argv[:] = ["-m", *self.arguments]
            _, spec, code = self._find(MODULE_DETAILS.get(), self.name)
            sys.argv[0] = str(spec.origin)
        elif os.path.isdir(self.name) or zipfile.is_zipfile(self.name):
            self._set_path(os.path.abspath(self.name))
            sys.argv[:] = [self.name, *self.arguments]
            _, spec, code = self._find(MAIN_DETAILS.get())
        else:
            self._set_path(os.path.dirname(os.path.realpath(self.name)))
            sys.argv[:] = [self.name, *self.arguments]
            path = os.path.abspath(self.name)
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            main.__loader__ = SourceFileLoader("__main__", path)
        values: dict[str, Any] = {"__builtins__": builtins, "__cached__": None}
        values["__file__"] = os.path.abspath(self.name)
        if spec is not None:
            values |= {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader}
            values |= {"__package__": spec.parent, "__spec__": spec}
        vars(main).update(values)
        found: CodeType = code
        return found

    def _find(self, find: Callable[..., Any], *arguments: Any) -> Any:
        """Find what to run, or refuse as Python itself refuses a module that cannot be run."""
        try:
            return find(*arguments)
        except ImportError as error:
            sys.exit(f"{sys.executable}: {error}")

    def _set_path(self, first: str) -> None:
        if not getattr(sys.flags, "safe_path", False) and sys.path:
            sys.path[0] = first


def _is_python(path: str) -> bool:
    """Tell whether a command is a Python script, by its first lines: a long path to Python is on the second."""
    with open(path, "rb") as file:
        first = file.read(512)
    return first.startswith(b"#!") and b"python" in first


def _show(ending: BaseException) -> None:
    """Show what ended the script as Python does, by a hook that the script may have set, with its own frames only."""
    shown = type(ending), ending, shown_traceback(ending)
    try:
        sys.excepthook(*shown)
    except SystemExit as error:  # the hook chose the exit code
        raise error.with_traceback(None) from None
    except BaseException as error:
        if hasattr(sys, "excepthook"):
            print("Error in sys.excepthook:", file=sys.stderr)
            sys.__excepthook__(type(error), error, shown_traceback(error))
            print("\nOriginal exception was:", file=sys.stderr)
        else:
            print("sys.excepthook is missing", file=sys.stderr)
        sys.__excepthook__(*shown)


def shown_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback without memprof's frames; so are those of the exceptions it came from."""
    seen, waiting = {id(error)}, [error]
    while waiting:
        one = waiting.pop()
        one.with_traceback(_theirs(one.__traceback__))
        for other in (one.__cause__, one.__context__):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)
    return error.__traceback__


def _theirs(step: TracebackType | None) -> TracebackType | None:
    frames = []
    while step is not None:
        if not _is_ours(step.tb_frame.f_code.co_filename):
            frames.append(step)
        step = step.tb_next
    following = None
    for frame in reversed(frames):
        frame.tb_next = following
        following = frame
    return following


def _is_ours(filename: str) -> bool:
    return filename.replace(os.sep, "/").startswith(_OURS) or filename == "<frozen runpy>"


def _guarded(call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:
        print(f"memprof failed at the end of the run ({error!r}).", file=sys.stderr)
