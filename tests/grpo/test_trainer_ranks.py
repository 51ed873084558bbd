"""Two processes under DDP and FSDP2: gradients as TRL has them there, whatever each rank has to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.forked import found_by_two_ranks
from tests.grpo.trainers import saved_llama, tiny_mixture

pytestmark = [pytest.mark.trl, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    saved_llama(folder / "model")
    tiny_mixture().save_pretrained(folder / "experts")
    return found_by_two_ranks("tests.grpo.two_ranks", folder)


@pytest.mark.parametrize(
    "scheme", ["single", "twice", "shared", "short", "coupled", "sharded", "experts", "sharded_experts"]
)
def test_one_step_is_trls(ranks: list[dict[str, Any]], scheme: str) -> None:
    for found in ranks:
        step = found[scheme]
        assert step["loss"][1] == pytest.approx(step["loss"][0], rel=1e-5)
        assert step["distance"] <= 1e-5
        assert max(step["norms"]) > 1e-3
        theirs, ours = step["metrics"]
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=1e-4, abs=1e-6, nan_ok=True), name


def test_ranks_had_different_work_and_equal_gradients(ranks: list[dict[str, Any]]) -> None:
    """Else the test above would show nothing about ranks."""
    assert ranks[0]["single"]["pieces"] > ranks[1]["single"]["pieces"] >= 1
    assert ranks[0]["single"]["norms"] == ranks[1]["single"]["norms"]


def test_memory_ran_out_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    """Else the step above that is short would show nothing."""
    assert [found["ran_out"] for found in ranks] == [[0, 2], [0, 0]]


def test_sums_in_fp32_are_synchronised(ranks: list[dict[str, Any]]) -> None:
    """All pieces of both ranks arrive, in bf16's precision, and the ranks agree to the bit."""
    assert ranks[0]["summed"]["pieces"] > 2
    assert ranks[0]["summed"]["norms"] == ranks[1]["summed"]["norms"]
    assert 0 < ranks[0]["summed"]["distance"] <= 0.03


def test_sharded_ranks_run_equally_many_pieces(ranks: list[dict[str, Any]]) -> None:
    """Each forward gathers weights from all ranks, so one without work keeps the other company."""
    assert ranks[0]["sharded"]["pieces"] == ranks[1]["sharded"]["pieces"] == ranks[0]["single"]["pieces"]


def test_a_run_tracks_trls(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        theirs, ours = found["run"]
        assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-5)
        for row, lean_row in zip(theirs["logged"], ours["logged"], strict=True):
            assert lean_row == pytest.approx(row, rel=1e-3, abs=2e-5, nan_ok=True)
    assert ranks[0]["run"][1]["weights"] == ranks[1]["run"][1]["weights"]


def test_rank_zero_chooses_for_a_memory_budget(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["budget"] == {"chosen": ["selective", 48, 2], "said": "Nothing fits."}
