"""Small steps that several commands share."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.cli.options import end_with_verdict

GIB = 2**30


def test_a_verdict_is_said_beside_the_result_and_a_bad_one_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from memprof.simulate.verdict import Verdict

    verdict = Verdict(
        gpu="a card", total_bytes=24 * GIB, needed_bytes=20 * GIB, reserved_bytes=19 * GIB, non_torch_bytes=GIB,
        margin=0.03, fits=True, flushes=False, phase="backward",
    )  # fmt: skip
    end_with_verdict(None)
    end_with_verdict(verdict)
    with pytest.raises(SystemExit) as ended:
        end_with_verdict(dataclasses.replace(verdict, needed_bytes=30 * GIB, fits=False))
    assert ended.value.code == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["Fits", "Does not fit"]
