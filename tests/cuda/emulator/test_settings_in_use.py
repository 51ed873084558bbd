"""Under each allocator setting, memprof's model reserves and allocates what torch's own allocator does, step by step."""

from __future__ import annotations

import pytest

from tests.cuda.emulated import device, run

STEPS = 2000
#: The settings, the share of the device that a call gives the process, and what has to happen for the case to count.
CASES = (
    ("", None, None),
    ("roundup_power2_divisions:4", None, None),
    ("roundup_power2_divisions:[64:2,256:4,>:8]", None, None),
    ("max_split_size_mb:64", None, None),
    ("large_segment_size_mb:64", None, None),
    ("large_segment_size_mb:12,max_split_size_mb:15", None, None),
    ("max_split_size_mb:64,max_non_split_rounding_mb:512", None, None),
    ("max_split_size_mb:64,large_segment_size_mb:60", None, None),
    ("expandable_segments:True", None, None),
    ("expandable_segments:True,large_segment_size_mb:64", None, None),
    ("expandable_segments:True,max_split_size_mb:64", None, None),
    ("garbage_collection_threshold:0.3", None, None),
    ("garbage_collection_threshold:0.3", 1.0, None),
    ("garbage_collection_threshold:0.3", 0.5, None),
    ("garbage_collection_threshold:0.3,max_split_size_mb:64", 0.5, None),
    ("garbage_collection_threshold:0.3,per_process_memory_fraction:0.5", None, None),
    ("per_process_memory_fraction:0.3,expandable_segments:True", None, "flushes"),
    ("per_process_memory_fraction:0.3,max_split_size_mb:64", None, "flushes"),
)


@pytest.mark.parametrize(("text", "fraction", "must"), CASES)
def test_the_model_counts_what_torch_counts(text: str, fraction: float | None, must: str | None) -> None:
    env = {**device("24GiB"), **({"PYTORCH_CUDA_ALLOC_CONF": text} if text else {})}
    for seed in (1, 2):
        found = run("settings_in_use", {"fraction": fraction, "seed": seed, "steps": STEPS}, env=env)
        assert found["step"] == STEPS, (text, fraction, seed, found)
        assert found["highest"][0] == found["highest"][1]
        assert found["flushes"][0] == found["flushes"][1]
        if must is not None:
            assert found[must][0] > 0
