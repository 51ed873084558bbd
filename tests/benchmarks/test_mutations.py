"""The list of wrong changes is about the source as it is; ``python -m benchmarks.mutations`` tries them (minutes)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutations.__main__ import Mutation, copy_of, mutations, tried
from benchmarks.tabling import ROOT

PACKAGES = ("memprof/allocator", "memprof/attribution", "memprof/simulate", "memprof/grpo", "reports")


@pytest.mark.parametrize("mutation", mutations(), ids=str)
def test_what_it_changes_stands_there_once(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert (ROOT / mutation.test.split()[0]).exists()


def test_it_has_sixty_over_five_packages() -> None:
    packages = Counter(package for m in mutations() for package in PACKAGES if m.file.startswith(package))
    assert packages.total() >= 60
    assert min(packages[package] for package in PACKAGES) >= 5


@pytest.mark.heavy
def test_a_change_that_nothing_tests_is_told_from_one_that_is(tmp_path: Path) -> None:
    copy = copy_of(ROOT, tmp_path)
    comment = Mutation("tests/config/test_fits.py", "memprof/config/fits.py", "No torch here.", "No torch.")
    wrong = next(m for m in mutations("memprof/config/fits.py"))
    assert [tried(copy, m) for m in (comment, wrong)] == ["NOT CAUGHT", "caught"]
    assert (copy / wrong.file).read_text(encoding="utf-8") == (ROOT / wrong.file).read_text(encoding="utf-8")
