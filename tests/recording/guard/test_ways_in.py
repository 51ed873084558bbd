"""Everything that a run calls of memprof's is behind the door: by the sources, and by breaking it."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WATCHING = ("memprof/recording", "memprof/watch", "memprof/compat", "integrations/callback", "integrations/trackers")
# What hands a function to somebody who calls it later, and which argument that is.
REGISTERS = {
    "Thread": "target", "register_at_fork": "after_in_child", "register": 0, "finalize": 1, "signal": 1, "put": 2,
    "attach": 0, "add_done_callback": 0, "setattr": 2,
}  # fmt: skip
TORCHS = {"BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_STEP", "AFTER_STEP", "WHEN_CUDA_IS_USED", "OOM_OBSERVER"}
GUARDS = {"hook", "around", "changing"}
# Handlers that were there before, constants, and the mechanism itself.
PLAIN = {
    "signal.SIG_DFL", "self._previous", "value", "previous", "observer", "waited",
    "types.MethodType(function, instance)", "lambda *_: None",
}  # fmt: skip
#: Torch calls it at every operation: it holds the door's ``try`` itself.
OWN_TRY = {"memprof/recording/trace/dispatch_mode.py:Watching.__torch_dispatch__"}


def files() -> Iterator[Path]:
    return (p for folder in WATCHING for p in (ROOT / folder).rglob("*.py"))


def guarded_names(tree: ast.AST) -> set[str]:
    """What the file assigns from a door."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(is_guarded(part, set()) for part in ast.walk(node.value)):
            names |= {ast.unparse(t) for target in node.targets for t in getattr(target, "elts", [target])}
    return names


def is_guarded(value: ast.AST, names: set[str]) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in GUARDS:
        return True
    return ast.unparse(value) in names | PLAIN


def ways_in(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each place that hands out a function, and the function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            torchs_own = name.startswith("register_") and name.endswith("_hook")
            position = None if called.endswith(".attach") else REGISTERS.get(name, 0 if torchs_own else None)
            if any(called.endswith(f"{known}.get()") for known in TORCHS):
                position = 0
            if isinstance(position, int) and len(node.args) > position:
                yield node, node.args[position]
            elif isinstance(position, str):
                yield from ((node, k.value) for k in node.keywords if k.arg == position)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("trainer.__init__", "sys.excepthook"):
            yield node, node.value


def methods(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef]]:
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef):
            yield from ((f"{kind.name}.{f.name}", f) for f in kind.body if isinstance(f, ast.FunctionDef))


def test_every_way_in_is_behind_the_door() -> None:
    found, open_ways = 0, []
    for path in files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names, where = guarded_names(tree), str(path.relative_to(ROOT))
        for node, function in ways_in(tree):
            found += 1
            if not is_guarded(function, names):
                open_ways.append(f"{where}:{node.lineno} {ast.unparse(function)}")  # type: ignore[attr-defined]
        for name, method in methods(tree):
            called = name.partition(".")[2]
            arguments = [a.arg for a in method.args.args[1:4]]
            events = called.startswith("on_") and arguments == ["args", "state", "control"]
            if events or called in ("find_spec", "__torch_dispatch__", "__torch_function__"):
                found += 1
                behind = any(ast.unparse(d) == "way_in" for d in method.decorator_list)
                if not behind and f"{where}:{name}" not in OWN_TRY:
                    open_ways.append(f"{where}:{name}")
    assert not open_ways
    assert found > 30


def test_an_unguarded_hook_is_refused() -> None:
    tree = ast.parse("threading.Thread(target=self._run)\nBEFORE_STEP.get()(door.hook(step))\nkept = door.hook(f)\n"
                     "patches.put(owner, 'name', kept)\npatches.put(owner, 'name', mine)")  # fmt: skip
    refused = [ast.unparse(f) for _, f in ways_in(tree) if not is_guarded(f, guarded_names(tree))]
    assert sorted(refused) == ["mine", "self._run"]


def test_a_callback_that_cannot_be_made_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's mistakes are raised; memprof's own end in one warning, and no event fails."""
    from memprof.integrations.callback import options

    from memprof import MemProfCallback
    from memprof.errors import UsageError

    with pytest.raises(UsageError):
        MemProfCallback(max_disk="much")
    monkeypatch.setattr(options, "parse_size", lambda _: {}["a mistake of memprof's"])
    with pytest.warns(UserWarning, match="stopped watching"):
        callback = MemProfCallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for event in ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_train_end"):
            getattr(callback, event)(None, None, None)
    assert callback.result.snapshots == []


def test_a_run_never_notices_a_function_of_ours_that_fails() -> None:
    """In a process of its own, which forks for each injection."""
    take = [sys.executable, "-m", "benchmarks.faults", "inject", "--sample", "60"]
    done = subprocess.run(take, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
