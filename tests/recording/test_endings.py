"""Signals, in processes of their own: the rescue runs once, and the process still dies as it would have."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, signal, sys, time
from memprof.recording.system.signals import Interrupts, Terminations
def rescue():
    print("rescued", flush=True)
watch = Terminations(rescue)
watch.start()
"""


def run(body: str, tmp_path: Path) -> tuple[int, list[str], str]:
    script = tmp_path / "s.py"
    script.write_text(HEAD + body)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    ("body", "code", "printed"),
    [
        ("os.kill(os.getpid(), 15)\ntime.sleep(9)", -15, ["rescued"]),
        ("watch.stop()\nos.kill(os.getpid(), 15)", -15, []),
        (
            "with watch.finishing():\n    os.kill(os.getpid(), 15)\n    print('written')\nprint('never')",
            -15,
            ["written"],
        ),
        ("with watch.finishing():\n    os.kill(os.getpid(), 15)\n    os.kill(os.getpid(), 15)\n    print(1)", -15, []),
        ("watch.stop()\nwatch.start()\nwatch.stop()\nprint(signal.getsignal(15) is signal.SIG_DFL)", 0, ["True"]),
    ],
    ids=["dies by it", "stopped", "finishing", "twice", "put back"],
)
def test_sigterm(body: str, code: int, printed: list[str], tmp_path: Path) -> None:
    assert run(body, tmp_path) == (code, printed, "")


def test_a_rescue_that_fails_says_so(tmp_path: Path) -> None:
    code, printed, said = run("watch._rescue = lambda: 1 / 0\nos.kill(os.getpid(), 15)\ntime.sleep(9)", tmp_path)
    assert (code, printed) == (-15, [])
    assert "ZeroDivisionError('division by zero')); the run goes on. Lost: what was recorded until this" in said


def test_where_no_thread_can_listen_it_is_said_and_a_signal_still_saves(tmp_path: Path) -> None:
    body = """
watch.stop()
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # no pipe can be opened
watch = Terminations(rescue)
watch.start()
os.kill(os.getpid(), 15)
time.sleep(9)"""
    code, printed, said = run(body, tmp_path)
    assert (code, printed) == (-15, ["rescued"])
    assert "Too many open files" in said
    assert "Lost: what is recorded until a signal ends a program that is stuck in one call." in said


def test_a_forked_child_is_not_the_run(tmp_path: Path) -> None:
    body = """
child = os.fork()
if child == 0:
    time.sleep(30)
time.sleep(0.2)
os.kill(child, 15)
print(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(3)  # longer than the listener's patience
print("alive")
"""
    assert run(body, tmp_path) == (0, ["15", "alive"], "")


def test_a_forked_child_keeps_somebody_elses_wakeup(tmp_path: Path) -> None:
    body = """
watch.stop()
theirs = os.pipe()[1]
os.set_blocking(theirs, False)
signal.set_wakeup_fd(theirs)
child = os.fork()
if child == 0:
    os._exit(signal.set_wakeup_fd(-1) == theirs)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(f"watch.start(){body}", tmp_path) == (0, ["1"], "")


def test_an_owners_handler_and_wakeup_are_left_alone(tmp_path: Path) -> None:
    body = """
watch.stop()
signal.signal(15, lambda *_: sys.exit(5))
other = Terminations(rescue)
other.start()
os.kill(os.getpid(), 15)
"""
    assert run(body, tmp_path)[0] == 5


def test_ctrl_c_waits_for_what_is_being_written(tmp_path: Path) -> None:
    once = "with Interrupts() as held:\n    os.kill(os.getpid(), 2)\n    print('written')\nprint(held.pending)"
    assert run(once, tmp_path) == (0, ["written", "True"], "")
    code, printed, err = run(once.replace("print('written')", "os.kill(os.getpid(), 2)\n    print(1)"), tmp_path)
    assert (code, printed) == (-signal.SIGINT, [])
    assert "KeyboardInterrupt" in err
