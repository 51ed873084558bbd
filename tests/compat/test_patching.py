"""Replacing attributes for a while, and everything put back as it was."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from memprof.compat.patching import Patches, bind, patching, replacing
from memprof.compat.targets import Missing, Target

MODULE = "memprof_test_of_patching"


class Base:
    @staticmethod
    def alone(x: int) -> int:
        return x

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    def work(self) -> str:
        return "theirs"


class Inherits(Base):
    pass


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = types.ModuleType(MODULE)
    made.Base, made.Inherits, made.answer = Base, Inherits, 42  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def target(path: str, *, needed: bool = True) -> Target:
    return Target(MODULE, path, needed_by=("run",)) if needed else Target(MODULE, path, optional_for=("run",))


def test_targets_are_replaced_inside_the_block_only(module: Any) -> None:
    with patching((target("answer"), 7), (target("Base.work"), lambda self: "ours")):
        assert module.answer == 7
        assert Base().work() == Inherits().work() == "ours"
    assert module.answer == 42
    assert Base().work() == "theirs"


def test_what_was_in_the_class_itself_is_put_back(module: Any) -> None:
    before = dict(vars(Base))
    with patching((target("Base.alone"), staticmethod(lambda x: -x)), (target("Base.made"), None)):
        assert Base.alone(3) == -3
    assert dict(vars(Base)) == before
    assert Base.alone(3) == 3
    assert Inherits.made() == "Inherits"


def test_what_a_class_had_inherited_it_inherits_again(module: Any) -> None:
    with patching((target("Inherits.work"), lambda self: "ours")):
        assert (Inherits().work(), Base().work()) == ("ours", "theirs")
    assert "work" not in vars(Inherits)


def test_an_exception_puts_back_too(module: Any) -> None:
    with pytest.raises(KeyError), patching((target("answer"), 7)):
        raise KeyError
    assert module.answer == 42


def test_inside_the_block_others_may_replace_it_too(module: Any) -> None:
    with patching((target("answer"), 7)):
        module.answer = 8
    assert module.answer == 42


def test_a_needed_target_that_is_gone_raises_and_nothing_is_replaced(module: Any) -> None:
    with pytest.raises(Missing, match="nothing is not in"), patching((target("answer"), 7), (target("nothing"), 1)):
        pytest.fail("entered")
    assert module.answer == 42


def test_an_optional_target_that_is_gone_is_left_out(module: Any) -> None:
    with patching((target("nothing", needed=False), 1), (target("answer"), 7)):
        assert module.answer == 7
    assert not hasattr(module, "nothing")


def test_a_name_nobody_has_is_not_made() -> None:
    with pytest.raises(Missing), replacing((Base, "work", None), (Base, "no_such_thing", 1)):
        pytest.fail("entered")
    assert Base().work() == "theirs"


def test_a_replacement_somebody_replaced_stays() -> None:
    thing, patches = Base(), Patches()
    patches.put(thing, "work", lambda: "ours")
    thing.work = lambda: "somebody's"  # type: ignore[method-assign]
    patches.restore()
    assert thing.work() == "somebody's"


def test_two_replacements_of_one_name_go_in_order() -> None:
    thing, patches = Base(), Patches()
    patches.put(thing, "work", lambda: "first")
    patches.put(thing, "work", lambda: "second")
    assert thing.work() == "second"
    patches.restore()
    assert "work" not in vars(thing)


def test_a_method_is_bound_to_one_object(module: Any) -> None:
    one, other = Base(), Base()
    bind(one, target("Base.work"), lambda self: self)
    assert one.work() is one  # type: ignore[comparison-overlap]
    assert other.work() == "theirs"
    with pytest.raises(Missing, match="Base has no method play"):
        bind(one, target("Base.play"), lambda self: self)


def test_patches_that_overlap_are_all_undone_whichever_is_restored_first(module: Any) -> None:
    """The one that was restored last used to put back what the other had put."""
    before = dict(vars(Base))
    for order in ((0, 1), (1, 0)):
        both = [Patches(), Patches()]
        for number, patches in enumerate(both):
            original = Base.work
            patches.put(Base, "work", lambda self, n=number, inner=original: f"{n} {inner(self)}")
            patches.redirect(Base.alone, Base, lambda x: x)
        assert Base().work() == "1 0 theirs"
        both[order[0]].restore()
        assert Base().work() in ("1 0 theirs", "0 theirs")
        both[order[1]].restore()
        assert Base().work() == "theirs"
        assert Base.alone(3) == 3
        assert dict(vars(Base)) == before
        assert not hasattr(Base.alone, "__wrapped__")


def test_patches_of_something_else_are_left_alone(module: Any) -> None:
    patches, theirs = Patches(), Base.work
    patches.put(Base, "work", lambda self: "ours")
    try:
        Base.work = lambda self: "somebody's"  # type: ignore[method-assign]
        patches.restore()
        assert Base().work() == "somebody's"
    finally:
        Base.work = theirs  # type: ignore[method-assign]
