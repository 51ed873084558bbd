"""Attribution of recordings whose kind was once read wrongly: what each category holds at the peak, in MiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.analysis import analyze

MIB = 1 << 20
RIGHT = {
    "min_state_made_in_init_inplace.pickle": {"weights": 100, "optimizer_state": 200, "activations": 296},
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_peak_is_what_the_program_made(shared: Path, name: str) -> None:
    path = shared / "cases4" / name
    if not path.exists():
        pytest.skip("the recordings are not here")
    found = analyze(path).peak.categories
    assert {c: round(found[c] / MIB) for c in found if c in RIGHT[name]} == RIGHT[name]
