"""Names that were published stay importable: old modules of ``memprof.grpo`` are the new ones."""

from __future__ import annotations

import importlib
import sys

import pytest

from memprof.grpo.moved import MOVED

pytest.importorskip("torch")


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_module_name_is_the_new_module(old: str) -> None:
    sys.modules.pop(f"memprof.grpo.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"memprof\.grpo\.{old} is now memprof\.grpo\.{MOVED[old]}"):
        found = importlib.import_module(f"memprof.grpo.{old}")
    assert found is importlib.import_module(f"memprof.grpo.{MOVED[old]}")


def test_the_documented_import_works() -> None:
    from memprof.grpo.checkpointing import apply_checkpointing

    from memprof.grpo.techniques.checkpointing import apply_checkpointing as now

    assert apply_checkpointing is now


def test_other_names_are_still_not_there() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("memprof.grpo.no_such_module")
