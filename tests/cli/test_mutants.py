"""What nobody writes is answered or refused in one sentence, and JSON that is answered is what its schema says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.mutate import SEEDS, Mutants


@pytest.mark.parametrize("inputs", [15, pytest.param(500, marks=pytest.mark.heavy)])
def test_mutated_inputs_end_in_an_answer_or_a_sentence(inputs: int, tmp_path: Path) -> None:
    mutants = Mutants(tmp_path)
    wrong = {(kind, n): ending for kind in SEEDS for n in range(inputs) if (ending := mutants.run(kind, n))}
    assert not wrong


# One of each that once ended in a traceback, or in JSON that the schema refuses: as ``--only KIND --seed N`` finds it.
FOUND = {
    "snapshot": (1042, 1094, 1120, 1245, 1285, 1303, 1339, 1395, 1525, 1531, 1792, 2016, 2091, 2158, 2211, 2354, 2420),
    "report": (1522, 2297, 300129),
    "compare": (1765,),
    "counters": (1011, 1855),
}


def test_what_was_found_stays_mended(tmp_path: Path) -> None:
    mutants = Mutants(tmp_path)
    assert not {(kind, n): wrong for kind, ns in FOUND.items() for n in ns if (wrong := mutants.run(kind, n))}
