"""Files with several snapshots: nothing is ignored, and a number chooses one."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memprof.cli import main
from memprof.errors import InputError
from memprof.snapshot import Action, load_snapshot
from tests.synthetic import SnapshotBuilder


def snapshots() -> list[dict[str, Any]]:
    found = []
    for size in (1, 2, 3):
        made = SnapshotBuilder()
        made.alloc(size << 20, "step")
        made.alloc(size << 10, "step")
        found.append(made.raw())
    return found


def appended(protocol: int) -> Callable[[list[Any]], bytes]:
    return lambda found: b"".join(pickle.dumps(raw, protocol=protocol) for raw in found)


FORMS: dict[str, Callable[[list[Any]], bytes]] = {
    **{f"appended, protocol {protocol}": appended(protocol) for protocol in (2, 4, 5)},
    "appended, packed": lambda found: gzip.compress(appended(4)(found)),
    "a list": lambda found: pickle.dumps(found, protocol=4),
    "a tuple": lambda found: pickle.dumps(tuple(found), protocol=4),
    "a dictionary": lambda found: pickle.dumps({f"rank {i}": raw for i, raw in enumerate(found)}, protocol=4),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_number_chooses_one(tmp_path: Path, form: str) -> None:
    file = tmp_path / "several.pickle"
    file.write_bytes(FORMS[form](snapshots()))
    with pytest.raises(InputError, match=r"contains 3 snapshots; choose one with memprof report --snapshot N"):
        load_snapshot(file)
    for number in (1, 2, 3):
        trace = load_snapshot(file, number).traces[0]
        assert trace.size[trace.action == Action.ALLOC].tolist() == [number << 20, number << 10]
    with pytest.raises(InputError, match="has no snapshot 4; it contains 3"):
        load_snapshot(file, 4)


@pytest.mark.parametrize("behind", [b"", b"\n", b"text", b"\0" * 9])
def test_what_is_no_pickle_behind_one_is_not_read(tmp_path: Path, behind: bytes) -> None:
    file = tmp_path / "one.pickle"
    file.write_bytes(appended(4)(snapshots()[:1]) + behind)
    assert len(load_snapshot(file).traces[0]) == len(load_snapshot(file, 1).traces[0]) == 4
    with pytest.raises(InputError, match="has no snapshot 2; it contains 1"):
        load_snapshot(file, 2)


def test_a_damaged_or_endless_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "several.pickle"
    whole = appended(4)(snapshots())
    file.write_bytes(whole[:-5])
    with pytest.raises(InputError, match="ends too early"):
        load_snapshot(file)
    file.write_bytes(b"\x80\x04N." * 5000)
    with pytest.raises(InputError, match="more than 100 pickles"):
        load_snapshot(file)


def test_commands_choose(tmp_path: Path) -> None:
    file = tmp_path / "several.pickle"
    file.write_bytes(appended(4)(snapshots()))

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, [*words])
        return done.exit_code, done.output

    code, text = run("report", str(file))
    assert code == 3
    assert "contains 3 snapshots" in text
    for words in (("report",), ("explain",), ("advise", "--estimate")):
        code, text = run(words[0], str(file), *words[1:], "--snapshot", "3", "--json", "-")
        assert code == 0, text
        answer = json.loads(text)
        listed = answer["allocations"] if words == ("explain",) else answer["peak"]["allocations"]
        assert [allocation["bytes"] for allocation in listed] == [3 << 20, 3 << 10]
    assert run("report", str(file), str(file), "--snapshot", "1")[0] == 2
    report = tmp_path / "report.json"
    assert run("report", str(file), "--snapshot", "2", "--json", str(report))[0] == 0
    assert run("report", str(report), "--snapshot", "1")[0] == 2
    assert run("advise", str(report), "--estimate", "--snapshot", "1")[0] == 2
