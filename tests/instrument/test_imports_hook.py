"""Being told of imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memprof.instrument.import_hook import _watcher, when_imported


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_pkg").mkdir()
    (tmp_path / "watched_pkg" / "__init__.py").write_text("from watched_pkg import inner\nvalue = inner.value\n")
    (tmp_path / "watched_pkg" / "inner.py").write_text("value = 7\n")
    (tmp_path / "watched_bad.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("watched_pkg", "watched_pkg.inner", "watched_bad"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(_watcher, "hooks", {})


def test_told_once_when_the_module_is_complete() -> None:
    told: list[tuple[str, int]] = []
    when_imported("watched_pkg.inner", lambda m: told.append((m.__name__, m.value)))
    when_imported("watched_pkg", lambda m: told.append((m.__name__, m.value)))
    assert told == []
    import watched_pkg  # type: ignore[import-not-found]

    assert told == [("watched_pkg.inner", 7), ("watched_pkg", 7)]
    when_imported("watched_pkg", lambda m: told.append((m.__name__, 0)))
    assert told[2:] == [("watched_pkg", 0)]
    assert watched_pkg.__spec__.loader.get_source("watched_pkg")  # tools that read sources still can


def test_a_mistake_of_ours_does_not_break_the_import(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("ours")

    when_imported("watched_pkg", broken)
    import watched_pkg

    assert watched_pkg.value == 7
    assert "Lost: what the script does with watched_pkg" in capsys.readouterr().err


def test_an_import_that_fails_or_is_not_there_fails_as_ever() -> None:
    told: list[str] = []
    for name in ("watched_bad", "watched_nowhere"):
        when_imported(name, lambda m: told.append(m.__name__))
    with pytest.raises(ZeroDivisionError):
        import watched_bad  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import watched_nowhere  # type: ignore[import-not-found]  # noqa: F401
    assert told == []
