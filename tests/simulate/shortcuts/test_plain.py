"""The simulator runs without its shortcuts, and answers without them where one fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytestmark = [pytest.mark.trl]


def _held(raw: Any) -> Any:
    facts = raw["memprof"]
    blocks = [(b["address"], b["size"], b["state"]) for s in raw["segments"] for b in s["blocks"]]
    return facts["highest"], facts["generation"], blocks


def test_every_shortcut_loads() -> None:
    """One that does not costs time in silence: a generation takes six times as long, with a note in the report."""
    from memprof.simulate.shortcut_switches import SHORTCUTS, shortcut, unloaded

    assert None not in [shortcut(name) for name in SHORTCUTS]
    assert unloaded() == []


def test_a_simulation_needs_no_shortcut(settings_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.shortcut_switches import SHORTCUTS, shortcut

    settings = settings_for(dtype="bfloat16", completion_length=6)
    expected = simulate_settings(settings)
    room = "memprof.simulate.shortcuts"
    for name in [name for name in sys.modules if name == room or name.startswith(f"{room}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, room, None)  # as if there were no such folder
    assert [shortcut(name) for name in SHORTCUTS] == [None] * len(SHORTCUTS)
    assert _held(simulate_settings(settings)) == _held(expected)


def test_a_filled_cache_decodes_as_one_that_a_prompt_filled(settings_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.shortcuts.decoding import learning

    settings, filled = settings_for(dtype="bfloat16", lora_r=4, completion_length=40), []
    expected = simulate_settings(settings)
    fill = learning.filled_cache
    monkeypatch.setattr(learning, "_tiles", lambda settings: True)
    monkeypatch.setattr(learning, "filled_cache", lambda *given: filled.append(given) or fill(*given))
    got = simulate_settings(settings)
    assert filled
    assert _held(got) == _held(expected)
    taken = [[(e["size"], e["user_metadata"]) for e in raw["device_traces"][0]] for raw in (got, expected)]
    assert sorted(taken[0]) == sorted(taken[1])


def test_a_shortcut_that_fails_is_told_of_and_changes_nothing(
    settings_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.shortcuts import results

    settings = settings_for(dtype="bfloat16", generation="none", beta=0.1)
    expected = simulate_settings(settings, shortcuts=False)
    for error in (IndexError, RuntimeError):

        def failing(*_: Any, error: type[Exception] = error) -> Any:
            raise error("never seen before")

        monkeypatch.setattr(results, "known_results", failing)
        got = simulate_settings(settings)
        assert got["memprof"]["highest"] == expected["memprof"]["highest"]
        assert [note for note in got["memprof"]["notes"] if "without shortcuts" in note and error.__name__ in note]
    assert not [note for note in expected["memprof"]["notes"] if "without shortcuts" in note]


def test_a_shortcut_that_cannot_be_loaded_is_told_of(
    settings_for: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from memprof.simulate import shortcuts
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.shortcut_switches import SHORTCUTS

    settings = settings_for(dtype="bfloat16", generation="none")
    expected = simulate_settings(settings)["memprof"]
    (tmp_path / "broken.py").write_text("import a_library_nobody_has")
    monkeypatch.setattr(shortcuts, "__path__", [*shortcuts.__path__, str(tmp_path)])
    monkeypatch.setitem(SHORTCUTS, "results", "broken")
    monkeypatch.setitem(SHORTCUTS, "rounds", "absent")
    got = simulate_settings(settings)["memprof"]
    assert got["highest"] == expected["highest"]
    [note] = [note for note in got["notes"] if "simulated without" in note]
    assert "'results' (ModuleNotFoundError: No module named 'a_library_nobody_has')" in note


@pytest.mark.heavy  # three simulations; a script that is executed whole is tried in ../script
def test_a_recorded_run_is_executed_whole_too(tiny: str, tmp_path: Path, loaded: list[str]) -> None:
    from memprof.cli import main
    from tests.simulate.test_cli import SMALL

    run, out = tmp_path / "run.pickle", tmp_path / "out.json"
    asked = ["--model", tiny, *SMALL, "--dtype", "bfloat16", "-o", str(run)]
    assert CliRunner().invoke(main, ["simulate", *asked]).exit_code == 0
    peaks = []
    for more in ([], ["--no-shortcuts"]):
        loaded.clear()
        arguments = ["--like", str(run), "--set", "completion_length=9", *more, "--json", str(out)]
        done = CliRunner().invoke(main, ["simulate", *arguments])
        assert done.exit_code == 0, done.output
        assert bool(loaded) is not bool(more)
        [_, changed] = json.loads(out.read_text())["runs"]
        peaks.append([changed["report"]["peak"][name] for name in ("allocated_bytes", "reserved_bytes")])
    assert peaks[0] == peaks[1]
