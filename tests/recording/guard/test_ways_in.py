"""Everything that a run calls of memprof's is guarded: by the sources, and by breaking it."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[3]
WATCHING = (
    "memprof/recording", "memprof/instrument", "memprof/compat",
    "integrations/callback", "integrations/run_recorder", "integrations/trackers",
)  # fmt: skip
# What hands a function to somebody who calls it later, and which argument that is.
REGISTERS = {
    "Thread": "target", "register_at_fork": "after_in_child", "register": 0, "finalize": 1, "signal": 1, "put": 2,
    "redirect": 2,
    "attach": 0, "add_done_callback": 0, "setattr": 2, "object.__setattr__": 2, "type.__setattr__": 2,
    "__setattr__": 1, "settrace": 0, "setprofile": 0, "settrace_all_threads": 0, "setprofile_all_threads": 0,
    "addaudithook": 0, "meta_path.insert": 1, "meta_path.append": 0, "path_hooks.insert": 1, "path_hooks.append": 0,
    "call_soon": 0, "Timer": 1,
}  # fmt: skip
TORCHS = {"BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_STEP", "AFTER_STEP", "WHEN_CUDA_IS_USED", "OOM_OBSERVER"}
GUARDS = {"hook", "around", "changing"}
# Handlers that were there before, constants, and the mechanism itself.
PLAIN = {
    "signal.SIG_DFL", "self._previous", "value", "previous", "observer",
    "types.MethodType(function, instance)", "lambda *_: None",
}  # fmt: skip
# What others call by its name, in a class of ours.
CALLED = {"find_spec", "__torch_dispatch__", "__torch_function__"}
#: Torch calls it at every operation: it has the guard's ``try`` itself.
OWN_TRY = {"memprof/recording/trace/dispatch_mode.py:Watching.__torch_dispatch__"}


def files() -> Iterator[Path]:
    return (p for folder in WATCHING for p in (ROOT / folder).rglob("*.py"))


class Source:
    """One file: the names in it that stand for others, its functions, and what it assigns from a guard."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.aliases: dict[str, str] = {}
        nodes = list(ast.walk(self.tree))
        self.functions = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = f"{getattr(node, 'module', '')}." if isinstance(node, ast.ImportFrom) else ""
                self.aliases |= {n.asname: module + n.name for n in node.names if n.asname}
            elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
                self.aliases |= {t.id: ast.unparse(node.value) for t in node.targets if isinstance(t, ast.Name)}
        behind = {c.name for c in nodes if isinstance(c, ast.ClassDef) and self._is_behind(c)}
        self.guarded = {
            ast.unparse(target)
            for node in nodes if isinstance(node, ast.Assign)
            if any(self.is_guarded(n) or (isinstance(n, ast.Call) and ast.unparse(n.func) in behind)
                   for n in ast.walk(node.value))
            for targets in node.targets for target in getattr(targets, "elts", [targets])
        }  # fmt: skip

    @staticmethod
    def _is_behind(kind: ast.ClassDef) -> bool:
        called = [f for f in kind.body if isinstance(f, ast.FunctionDef) and f.name in CALLED]
        return bool(called) and all("guarded" in map(ast.unparse, f.decorator_list) for f in called)

    def is_guarded(self, value: ast.AST) -> bool:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in GUARDS:
            return True
        return ast.unparse(value) in getattr(self, "guarded", set()) | PLAIN

    def _called(self, function: ast.AST) -> str:
        """What is called, whatever it is named here."""
        name = ast.unparse(function)
        for _ in range(5):
            head, dot, rest = name.partition(".")
            if head not in self.aliases:
                break
            name = self.aliases[head] + dot + rest
        return name

    def _is_function(self, value: ast.AST) -> bool:
        """Whether it is a function or method of this file, or made of one."""
        own = isinstance(value, ast.Lambda) or ast.unparse(value).removeprefix("self.") in self.functions
        return own or (isinstance(value, ast.Call) and any(map(self._is_function, (value.func, *value.args))))

    def ways_in(self) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Each place that hands out a function, and the function."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from ((node, function) for function in self._handed(node))
            elif isinstance(node, ast.Assign):
                places = [p for target in node.targets for p in getattr(target, "elts", [target])]
                if any(map(_is_anothers, places)) and (self._is_function(node.value) or self.is_guarded(node.value)):
                    yield node, node.value

    def _handed(self, node: ast.Call) -> Iterator[ast.AST]:
        called = self._called(node.func)
        name = called.rpartition(".")[2]
        torchs_own = name.startswith("register_") and name.endswith("_hook")
        position = next((p for known, p in REGISTERS.items() if f".{called}".endswith(f".{known}")), None)
        position = None if called.endswith(".attach") else 0 if torchs_own and position is None else position
        if any(called.endswith(f"{known}.get()") for known in TORCHS):
            position = 0
        if isinstance(position, int) and len(node.args) > position:
            yield node.args[position]
        elif isinstance(position, str):
            yield from (k.value for k in node.keywords if k.arg == position)

    def methods(self) -> Iterator[tuple[str, ast.FunctionDef]]:
        for kind in ast.walk(self.tree):
            if isinstance(kind, ast.ClassDef):
                yield from ((f"{kind.name}.{f.name}", f) for f in kind.body if isinstance(f, ast.FunctionDef))


def _is_anothers(place: ast.AST) -> bool:
    """Whether it is an attribute of an object that is not this class's own, or stands in one's dictionary."""
    words = ast.unparse(place)
    if isinstance(place, ast.Subscript):
        return ".__dict__[" in words or words.startswith("vars(")
    return isinstance(place, ast.Attribute) and not words.startswith(("self.", "cls."))


def test_every_way_in_is_guarded() -> None:
    found, open_ways = 0, []
    for path in files():
        source, where = Source(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT))
        for node, function in source.ways_in():
            found += 1
            if not source.is_guarded(function):
                open_ways.append(f"{where}:{node.lineno} {ast.unparse(function)}")  # type: ignore[attr-defined]
        for name, method in source.methods():
            called = name.partition(".")[2]
            arguments = [a.arg for a in method.args.args[1:4]]
            events = called.startswith("on_") and arguments == ["args", "state", "control"]
            if events or called in CALLED:
                found += 1
                behind = any(ast.unparse(d) == "guarded" for d in method.decorator_list)
                if not behind and f"{where}:{name}" not in OWN_TRY:
                    open_ways.append(f"{where}:{name}")
    assert not open_ways
    assert found > 30


REFUSED = {
    "threading.Thread(target=self._run)": "self._run",
    "patches.put(owner, 'name', mine)": "mine",
    "patches.redirect(function, instance, mine)": "mine",
    "sys.settrace(mine)": "mine",
    "from sys import setprofile as watch\nwatch(mine)": "mine",
    "sys.meta_path.insert(0, mine)": "mine",
    "finders = sys.meta_path\nfinders.append(mine)": "mine",
    "class Finder:\n    def find_spec(self): ...\nmine = Finder()\nsys.meta_path.insert(0, mine)": "mine",
    "put = setattr\nput(model, 'forward', mine)": "mine",
    "from builtins import setattr as put\nput(model, 'forward', mine)": "mine",
    "object.__setattr__(model, 'forward', mine)": "mine",
    "def mine(): ...\nmodel.forward = mine": "mine",
    "def mine(): ...\nvars(model)['forward'] = mine": "mine",
    "def mine(): ...\nmodel.__dict__['forward'] = partial(mine)": "partial(mine)",
}
ACCEPTED = (
    "BEFORE_STEP.get()(guard.hook(step))", "kept = guard.hook(f)\npatches.put(owner, 'name', kept)",
    "put = setattr\nput(model, 'forward', guard.around(f))", "self.on_oom = mine", "model.training = was",
    "class Finder:\n    @guarded\n    def find_spec(self): ...\nmine = Finder()\nsys.meta_path.insert(0, mine)",
)  # fmt: skip


@pytest.mark.parametrize("text", [*REFUSED, *ACCEPTED])
def test_a_way_in_is_seen_whatever_it_is_called(text: str) -> None:
    source = Source(text)
    refused = [ast.unparse(f) for _, f in source.ways_in() if not source.is_guarded(f)]
    assert refused == ([REFUSED[text]] if text in REFUSED else [])


def test_a_callback_that_cannot_be_made_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's mistakes are raised; memprof's own end in one warning, and no event fails."""
    from memprof.integrations.callback import callback as module

    from memprof import MemProfCallback
    from memprof.errors import UsageError

    with pytest.raises(UsageError):
        MemProfCallback(max_disk="much")
    with pytest.raises(TypeError, match="no_such_option"):
        MemProfCallback(no_such_option=1)  # type: ignore[call-arg]
    with pytest.raises(ZeroDivisionError):
        MemProfCallback(steps=(step // 0 for step in (1, 2)))
    monkeypatch.setattr(module, "_numbers", lambda _: {}["a mistake of memprof's"])
    with pytest.warns(UserWarning, match="stopped watching") as told:
        callback = MemProfCallback()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for event in 2 * ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_train_end"):
            getattr(callback, event)(None, None, None)
    assert callback.result.snapshots == []
    assert "nothing recorded" in callback._repr_html_()


def test_a_run_never_notices_a_function_of_ours_that_fails() -> None:
    """In a process of its own, which forks for each injection."""
    done = forked.python(["-m", "benchmarks.faults", "inject", "--sample", "30"], ROOT, os.environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
