"""Signals, in processes of their own: what was recorded is saved once, the process dies as it would have without
memprof, and so does every process that it starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, signal, sys, time
from memprof.recording.system.signals import Interrupts, Terminations, delayed_termination, finish_first
def save():
    print("saved", flush=True)
watch = Terminations(save)
watch.start()
def kill(number=15):
    os.kill(os.getpid(), number)
def ended(child, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "alive"
"""


def run(body: str, tmp_path: Path) -> tuple[int, list[str], str]:
    script = tmp_path / "s.py"
    script.write_text(HEAD + body)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.split(), done.stderr


DELAYED = "with delayed_termination():\n    kill()\n    "


@pytest.mark.parametrize(
    ("body", "code", "printed"),
    [
        ("kill()\ntime.sleep(9)", -15, ["saved"]),
        ("watch.stop()\nkill()", -15, []),
        (f"{DELAYED}print('written')\nprint('never')", -15, ["written", "saved"]),
        (f"{DELAYED}watch.stop()\n    print('written')\nprint('never')", -15, ["written"]),
        (f"{DELAYED}kill()\n    print(1)", -15, []),
        ("with finish_first():\n    with finish_first():\n        kill()\n    print('both')", -15, ["both", "saved"]),
        ("Terminations(lambda: print('newest')).start()\nkill()\ntime.sleep(9)", -15, ["newest", "saved"]),
        ("watch.stop()\nwatch.start()\nwatch.stop()\nprint(signal.getsignal(15) is signal.SIG_DFL)", 0, ["True"]),
    ],
    ids=["dies by it", "stopped", "delayed", "delayed to the end", "twice", "nested", "two trainings", "put back"],
)
def test_sigterm(body: str, code: int, printed: list[str], tmp_path: Path) -> None:
    assert run(body, tmp_path) == (code, printed, "")


def test_a_save_that_fails_is_reported_and_the_process_still_dies(tmp_path: Path) -> None:
    code, printed, err = run("watch.save = lambda: 1 / 0\nkill()\ntime.sleep(9)", tmp_path)
    assert (code, printed) == (-15, [])
    assert "ZeroDivisionError('division by zero')); the run goes on. Lost: what was recorded until SIGTERM" in err


def test_a_programs_own_handler_is_left_alone(tmp_path: Path) -> None:
    body = """
watch.stop()
signal.signal(15, lambda *_: sys.exit(5))
Terminations(save).start()
kill()
"""
    assert run(body, tmp_path)[:2] == (5, [])


# A time limit of a reward's sandbox: the child stands in one call into C that takes hours.
LONG_CALL = "print('ready', flush=True); sum(range(10**13))"
STARTED = {
    "fork": f"def start():\n    child = os.fork()\n    if not child:\n        {LONG_CALL}\n    return child",
    "fork in a thread": """
def start():
    import threading
    children = []
    def fork():
        child = os.fork()
        if not child:
            LONG_CALL
        children.append(child)
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return children[0]
""",
    "multiprocessing": """
def answer():
    LONG_CALL
def start():
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=answer)
    process.start()
    return process.pid
""",
    "subprocess": 'def start():\n    import subprocess\n    return subprocess.Popen([sys.executable, "-c", CALL]).pid',
    "preexec_fn": """
def start():
    import subprocess
    return subprocess.Popen([sys.executable, "-c", CALL], preexec_fn=os.setsid).pid
""",
    "posix_spawn": 'def start():\n    return os.posix_spawn(sys.executable, [sys.executable, "-c", CALL], os.environ)',
}


@pytest.mark.parametrize("how", STARTED)
def test_a_child_in_a_call_into_c_dies_at_once(how: str, tmp_path: Path) -> None:
    start = STARTED[how].replace("LONG_CALL", LONG_CALL)
    body = f"CALL = {LONG_CALL!r}\n{start}\nchild = start()\ntime.sleep(1)\nos.kill(child, 15)\nprint(ended(child))"
    assert run(body, tmp_path) == (0, ["ready", "-15"], "")


def test_a_child_dies_by_a_signal_that_comes_while_it_is_forked(tmp_path: Path) -> None:
    """A Python handler forgets such a signal: a pool of processes whose worker it was for waits for ever."""
    body = """
found = set()
for _ in range(300):
    child = os.fork()
    if not child:
        time.sleep(60)
    os.kill(child, 15)
    found.add(ended(child))
print(found)
child = os.fork()
if not child:
    os._exit(signal.getsignal(15) is signal.SIG_DFL and 15 not in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(ended(child), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
kill()
time.sleep(9)
"""
    assert run(body, tmp_path) == (-15, ["{-15}", "1", "set()", "saved"], "")


def test_a_signal_before_memprofs_hook_in_the_child_ends_the_child_alone(tmp_path: Path) -> None:
    before = "import os\nearly = []\nos.register_at_fork(after_in_child=lambda: early and os.kill(os.getpid(), 15))\n"
    (tmp_path / "first.py").write_text(before)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport first\n{HEAD}"
    script += "first.early.append(1)\nchild = os.fork()\nif not child:\n    os._exit(3)\n"
    script += "print(ended(child))\ntime.sleep(0.5)\nprint('goes on')"
    path = tmp_path / "s.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["-15", "goes", "on"], "")


def test_a_program_that_blocks_the_signal_finds_it_blocked(tmp_path: Path) -> None:
    body = """
signal.pthread_sigmask(signal.SIG_BLOCK, {15})
child = os.fork()
if not child:
    os._exit(15 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(ended(child), 15 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    assert run(body, tmp_path) == (0, ["1", "True"], "")


def test_a_child_that_installs_memprofs_handler_dies_by_it_and_saves_nothing(tmp_path: Path) -> None:
    """As one that ends a block of the parent's with ``signal.signal(SIGTERM, previous)``."""
    body = """
previous = signal.signal(15, lambda *_: None)
child = os.fork()
if not child:
    signal.signal(15, previous)
    kill()
    os._exit(3)
print(ended(child))
"""
    assert run(body, tmp_path) == (0, ["-15"], "")


def test_ctrl_c_waits_for_what_is_being_written(tmp_path: Path) -> None:
    once = "with Interrupts() as delayed:\n    kill(2)\n    print('written')\nprint(delayed.pending)"
    assert run(once, tmp_path) == (0, ["written", "True"], "")
    code, printed, err = run(once.replace("print('written')", "kill(2)\n    print(1)"), tmp_path)
    assert (code, printed) == (-signal.SIGINT, [])
    assert "KeyboardInterrupt" in err
    code, printed, err = run("with finish_first():\n    kill(2)\n    print('written')\nprint('never')", tmp_path)
    assert (code, printed) == (-signal.SIGINT, ["written"])
    assert err.count("Traceback") == 1


def test_a_child_forked_meanwhile_has_pythons_handler_of_ctrl_c(tmp_path: Path) -> None:
    body = """
with Interrupts():
    child = os.fork()
    if not child:
        os._exit(signal.getsignal(2) is signal.default_int_handler)
    print(ended(child))
"""
    assert run(body, tmp_path) == (0, ["1"], "")
