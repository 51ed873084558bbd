"""What nobody writes is answered or refused in one sentence, and JSON that is answered is what its schema says."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from benchmarks.faults.mutate import KINDS, Mutants


@pytest.mark.parametrize("inputs", [15, pytest.param(500, marks=pytest.mark.heavy)])
def test_mutated_inputs_end_in_an_answer_or_a_sentence(inputs: int, tmp_path: Path) -> None:
    mutants = Mutants(tmp_path)
    wrong = {(kind, n): ending for kind in KINDS for n in range(inputs) if (ending := mutants.run(kind, n))}
    assert not wrong


# One of each that once ended in a traceback, or in JSON that the schema refuses: as ``--only KIND --seed N`` finds it.
FOUND = {
    "snapshot": (1042, 1094, 1120, 1245, 1285, 1303, 1339, 1395, 1525, 1531, 1792, 2016, 2091, 2158, 2211, 2354, 2420),
    "report": (1522, 2297, 300129),
    "compare": (1765,),
    "counters": (1011, 1855),
}


# The same of those that go through functions: a world of 2**62 ranks, a config.json of words, YAML's own errors, ...
FOUND_BEHIND: dict[str, tuple[int, ...]] = {
    "snapshot": (10010031,),
    "bytes": (10016313,),
    "ranks": (*range(500000, 500100), 601009),
    "settings": (600000, 600104, 600106, 600145, 600294, 600540, 600937, 601010, 601273, 602365),
}


@pytest.mark.parametrize("kind", FOUND_BEHIND)
def test_what_was_found_behind_the_commands_stays_mended(kind: str, tmp_path: Path) -> None:
    mutants = Mutants(tmp_path)
    assert not {n: wrong for n in FOUND_BEHIND[kind] if (wrong := mutants.run(kind, n, command=False))}


def test_a_prediction_that_is_not_as_documented_is_said() -> None:
    from benchmarks.faults.inputs import snapshot
    from memprof.analysis.analysis import analyze
    from memprof.snapshot import snapshot_from_raw

    raw = snapshot()
    raw["memprof"]["fit"] = {"fits": "perhaps"}
    report = analyze(snapshot_from_raw(raw)).to_dict()
    assert "fit" not in report
    assert any("'fit' is not as documented" in note for note in report["notes"])


def test_ranks_that_no_run_has_are_refused_and_not_counted_to() -> None:
    from memprof.analysis.ranks.merge import world_size_of
    from memprof.errors import InputError
    from tests.report.files import validate
    from tests.reports.sample import sample

    report = sample()[0]
    for name in ("rank", "world_size"):
        with pytest.raises(InputError, match=f"at source/{name}"):
            validate({**report, "source": {**report["source"], name: 1 << 40}})
    with pytest.raises(InputError, match="which no run has"):
        world_size_of([8], [0, 1 << 40])


@pytest.mark.parametrize("number", ["1.0", "1e300", "2.5"])
def test_a_count_with_a_point_is_none(number: str, tmp_path: Path) -> None:
    from memprof.errors import InputError
    from tests.report.files import read_memprof_json
    from tests.reports.sample import sample

    text = json.dumps({**sample()[0], "max_requested_bytes": 7}).replace('"max_requested_bytes": 7', "HERE")
    (path := tmp_path / "r.json").write_text(text.replace("HERE", f'"max_requested_bytes": {number}'))
    with pytest.raises(InputError, match=r"expected `int`, got `float` .at max_requested_bytes"):
        read_memprof_json(path)


def test_a_small_report_asks_for_little_memory(tmp_path: Path) -> None:
    from tests.report.files import read_memprof_json
    from tests.reports.sample import sample

    (path := tmp_path / "r.json").write_text(json.dumps(sample()[0]))
    read_memprof_json(path)  # the schema's checks are compiled once
    tracemalloc.start()
    try:
        read_memprof_json(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 32 * path.stat().st_size + (32 << 20)


def test_sentences_stay_one_printable_line() -> None:
    from memprof.errors import InputError

    assert str(InputError("a\n  b\x1b[31m\u202e")) == "a   b\\x1b[31m\\x202e"


def test_what_was_found_stays_mended(tmp_path: Path) -> None:
    mutants = Mutants(tmp_path)
    assert not {(kind, n): wrong for kind, ns in FOUND.items() for n in ns if (wrong := mutants.run(kind, n))}
