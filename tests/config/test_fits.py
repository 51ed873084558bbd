"""Tests of the one meaning of *fits*: what is kept, for what, and what no card may be said to hold."""

import pytest

from benchmarks.faults.fields import example_of
from memprof.config.expected_error import comparisons
from memprof.config.fits import MARGIN, fits, kept_for, limit_bytes, margin_of, needed_bytes, room_bytes, wide_margin
from memprof.config.gpus import CONTEXT_BYTES, find_gpu
from memprof.config.settings import Settings
from memprof.config.trl_arguments import assumed_of
from memprof.report.simulation import Fit
from tests.report.plain import compare
from tests.reports.compared import as_run, leaner
from tests.reports.sample import sample

CARD = find_gpu("RTX 4090")


def test_a_need_on_the_limit_fits_and_one_byte_more_does_not() -> None:
    limit = limit_bytes(CARD.total_bytes)
    assert fits(limit, CARD.total_bytes)
    assert not fits(limit + 1, CARD.total_bytes)
    assert room_bytes(CARD) + CARD.context_bytes == limit
    assert limit * (1 + MARGIN) <= CARD.total_bytes < (limit + 1) * (1 + MARGIN)


def test_what_is_kept_follows_what_is_not_known() -> None:
    told = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "prompt_length": 64, "completion_length": 192}
    known = Settings(**told, assumed=assumed_of(told))
    assert margin_of(known.known, CARD) == MARGIN
    open_length = Settings(told["model"], assumed=assumed_of({"model": told["model"]})).known
    assert margin_of(open_length, CARD) > MARGIN
    assert "length" in kept_for(open_length, CARD)[-1].why
    never = Settings(**told, generation="vllm").known
    assert (margin_of(never, CARD), "vLLM" in kept_for(never, CARD)[0].why) == (wide_margin(), True)


def test_a_row_of_given_length_has_no_prompt_to_guess() -> None:
    assert {"prompt_length", "completion_length"}.isdisjoint(assumed_of({"trainer": "sft", "max_length": 512}))
    assert "prompt_length" in assumed_of({"trainer": "sft"})


def test_a_setting_that_is_changed_is_no_longer_assumed() -> None:
    settings = Settings("m", assumed=("prompt_length", "dtype"))
    assert settings.with_(prompt_length=64).assumed == ("dtype",)
    assert Settings.from_dict(settings.to_dict()).assumed == settings.assumed
    assert settings == Settings("m")


def test_no_exactly_known_run_needed_more_than_the_margin_of_its_kind() -> None:
    for row in comparisons():
        if row.where in ("gpu", "emulated"):
            kept = wide_margin() if row.where == "gpu" else MARGIN
            assert row.measured_bytes <= row.simulated_bytes * (1 + kept), row.name


def test_a_context_that_nobody_recorded_is_room_that_is_taken() -> None:
    """0.07 GiB left of a 4090 was called a fit, where a CUDA context takes more."""
    report, other = sample()[0], leaner()
    report["device_peak"] |= {"reserved_bytes": CARD.total_bytes - 70 * 2**20, "non_torch_bytes": None}
    found = compare([as_run(report, "a"), as_run(other, "b")], CARD.total_bytes)["capacity"]
    assert found["needs"][0] == needed_bytes(report["device_peak"]["reserved_bytes"], None)
    assert found["left"][0] == 70 * 2**20 - CONTEXT_BYTES
    assert found["fits"] == [False, True]


@pytest.mark.parametrize("oom", [True, False])
def test_a_recorded_run_fits_its_own_device_where_it_did_not_run_out(oom: bool) -> None:
    report, other = sample()[0], leaner()
    report["device_peak"]["non_torch_bytes"] = report["source"]["device_total_bytes"]  # others held most of it
    failed = {"requested_bytes": 1, "device_free_bytes": 0, "phase": None, "step": None, "stack": []}
    report["oom"] = report["oom"] or failed if oom else None
    data = compare([as_run(report, "a"), as_run(other, "b")])["capacity"]
    assert data["from"] == "device"
    assert data["fits"][0] is not oom


def test_a_simulated_runs_own_verdict_is_repeated() -> None:
    report, other = sample()[0], leaner()
    report["source"]["kind"] = "simulated"
    report["fit"] = {**example_of(Fit), "total_bytes": CARD.total_bytes, "fits": False}
    data = compare([as_run(report, "a"), as_run(other, "b")], CARD.total_bytes)["capacity"]
    assert data["fits"] == [False, True]
