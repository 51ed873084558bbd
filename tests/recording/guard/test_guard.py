"""Wrapping one object's methods, and putting them back."""

from __future__ import annotations

import functools
import signal
import warnings
from typing import Any

import pytest

from memprof.recording.guard import FailureGuard, MethodPatcher


class Thing:
    def work(self, x: int, fail: bool = False) -> int:
        if fail:
            raise KeyError("the user's own")
        return x + 1

    def outer(self, **kwargs: Any) -> int:
        return self.work(1, **kwargs)


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.errors: list[BaseException] = []
        self.calls: list[Any] = []
        self.guard = FailureGuard(say=self.said.append)
        self.seams = MethodPatcher(self.guard, self.errors.append)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        self.calls.append((args, kwargs))
        return "token"

    def leave(self, token: Any, result: Any, error: BaseException | None) -> None:
        self.calls.append((token, result, error))


def test_a_call_passes_through_and_is_seen() -> None:
    thing, log = Thing(), Log()
    assert log.seams.wrap(thing, "work", log.enter, log.leave)
    assert not log.seams.wrap(thing, "no_such_method", log.enter)
    assert thing.work(4, fail=False) == 5
    assert log.calls == [((4,), {"fail": False}), ("token", 5, None)]
    assert Thing().work(1) == 2
    assert len(log.calls) == 2
    log.seams.restore()
    assert vars(thing) == {}


def test_an_instances_own_attribute_comes_back() -> None:
    thing, log = Thing(), Log()
    thing.work = own = lambda x: x * 10  # type: ignore[method-assign, assignment, misc]
    log.seams.wrap(thing, "work", log.enter)
    assert thing.work(2) == 20
    log.seams.restore()
    assert vars(thing) == {"work": own}


def test_the_users_exception_is_untouched_and_told_once_at_the_outermost_seam() -> None:
    thing, log = Thing(), Log()
    log.seams.wrap(thing, "outer")
    log.seams.wrap(thing, "work", log.enter, log.leave)
    with pytest.raises(KeyError, match="own") as caught:
        thing.outer(fail=True)
    assert log.errors == [caught.value]
    assert log.calls[-1] == ("token", None, caught.value)
    assert log.said == []


def test_what_we_raise_never_reaches_the_user() -> None:
    thing, log = Thing(), Log()
    log.seams.wrap(thing, "work", lambda *_: 1 / 0, lambda *_: [][1])
    assert thing.work(1) == 2
    assert isinstance(log.guard.failure, ZeroDivisionError)
    assert thing.work(2) == 3
    assert len(log.said) == 1
    assert log.errors == []


def test_a_wrapper_wrapped_by_somebody_else_stays_and_sleeps() -> None:
    thing, log = Thing(), Log()
    log.seams.wrap(thing, "work", log.enter)
    ours = thing.work
    thing.work = theirs = functools.wraps(ours)(lambda x: ours(x) + 100)  # type: ignore[method-assign]
    log.seams.restore()
    assert thing.work is theirs
    assert thing.work(1) == 102
    assert log.calls == []


@pytest.mark.parametrize("when", ["enter", "leave"])
@pytest.mark.parametrize("outermost", [True, False])
def test_a_ctrl_c_while_memprof_works_is_told_at_the_outermost_seam(when: str, outermost: bool) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    thing, log = Thing(), Log()
    if not outermost:
        log.seams.wrap(thing, "outer")
    log.seams.wrap(thing, "work", *([interrupted, None] if when == "enter" else [None, interrupted]))
    with pytest.raises(KeyboardInterrupt) as caught:
        thing.work(1) if outermost else thing.outer()
    assert log.errors == [caught.value]
    assert log.guard.failure is None


def test_what_failed_where_nothing_more_could_be_called_is_told_later() -> None:
    guard = FailureGuard("training", "all of it")

    def step(more: int = 5) -> None:
        if more:
            step(more - 1)

    def deeper() -> None:
        hook()
        deeper()

    hook = guard.hook(step)
    with pytest.raises(RecursionError):
        deeper()
    with pytest.warns(UserWarning, match=r"RecursionError.*training goes on\. Lost: all of it\."):
        guard(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard(None)


def test_every_recording_that_fails_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: print(message)
        for _ in range(2):
            FailureGuard()(lambda: 1 / 0)
    assert capfd.readouterr().out.count("Lost: ") == 2


class OutOfTime(Exception):
    pass


class Handler:
    def __call__(self, *_: Any) -> None:
        raise OutOfTime

    def method(self, *_: Any) -> None:
        raise OutOfTime


@pytest.mark.parametrize("handler", [Handler(), Handler().method], ids=["object", "method"])
def test_what_a_signals_handler_raises_is_the_runs(handler: Any) -> None:
    guard, done = FailureGuard(), []

    def interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for way in (
            guard,
            lambda step: guard.hook(step)(),
            lambda step: guard.run_all_cleanups(step, lambda: done.append(1)),
        ):
            with pytest.raises(OutOfTime):
                way(interrupted)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert guard.failure is None
    assert done == [1]


def test_a_mistake_under_a_handler_of_ours_is_ours() -> None:
    before = signal.signal(signal.SIGUSR1, FailureGuard().hook(lambda *_: None))
    try:
        with pytest.warns(UserWarning, match="ValueError"):
            FailureGuard().hook(lambda: signal.Signals(-1))()
    finally:
        signal.signal(signal.SIGUSR1, before)
