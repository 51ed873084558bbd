"""Under each allocator setting, memprof's model reserves and allocates what torch's own allocator does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.emulated import device, run

STEPS = 1500
#: The settings, and the share of the device that a call gives the process.
CASES: tuple[tuple[str, float], ...] = (
    ("", 1.0),
    ("roundup_power2_divisions:4", 1.0),
    ("roundup_power2_divisions:[64:2,256:4,>:8]", 1.0),
    ("max_split_size_mb:64", 1.0),
    ("large_segment_size_mb:64", 1.0),
    ("large_segment_size_mb:12,max_split_size_mb:15", 1.0),
    ("max_split_size_mb:64,max_non_split_rounding_mb:512", 1.0),
    ("max_split_size_mb:64,large_segment_size_mb:60", 1.0),
    ("expandable_segments:True", 1.0),
    ("expandable_segments:True,large_segment_size_mb:64", 1.0),
    ("expandable_segments:True,max_split_size_mb:64", 1.0),
    ("garbage_collection_threshold:0.3", 1.0),
    ("garbage_collection_threshold:0.3", 0.5),
    ("garbage_collection_threshold:0.3,max_split_size_mb:64", 0.5),
    ("garbage_collection_threshold:0.3,expandable_segments:True", 0.5),
    ("expandable_segments:True", 0.3),
    ("max_split_size_mb:64", 0.3),
)
#: A fraction in the text counts when the allocator begins, so each of these needs a process.
FROM_THE_START = (
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.5",
    pytest.param("per_process_memory_fraction:0.3,expandable_segments:True", marks=pytest.mark.heavy),
)


def test_the_model_counts_what_torch_counts() -> None:
    cases = [(text, fraction, seed) for text, fraction in CASES for seed in (1, 2)]
    asked = [{"text": text, "fraction": fraction, "seed": seed, "steps": STEPS} for text, fraction, seed in cases]
    found = run("settings_in_use", asked, env=device("24GiB"))
    for case, counts in zip(cases, found, strict=True):
        agreed(case, counts)
    limited = [counts["flushes"][0] for (_, fraction, _), counts in zip(cases, found, strict=True) if fraction == 0.3]
    assert all(limited), "a fraction of 0.3 fills up"


@pytest.mark.parametrize("text", FROM_THE_START)
def test_a_fraction_in_the_text_counts_as_one_that_is_set(text: str) -> None:
    env = {**device("24GiB"), "PYTORCH_CUDA_ALLOC_CONF": text}
    (counts,) = run("settings_in_use", [{"text": None, "fraction": None, "seed": 1, "steps": STEPS}], env=env)
    agreed(text, counts)


def agreed(case: object, counts: dict[str, Any]) -> None:
    assert counts["step"] == STEPS, (case, counts)
    assert counts["highest"][0] == counts["highest"][1], case
    assert counts["flushes"][0] == counts["flushes"][1], case
