"""Allocator settings are read as torch reads them: the same strings refused, the same values of the others."""

from __future__ import annotations

from memprof.allocator.settings import AllocatorSettings, parse_settings, settings_of
from memprof.errors import UsageError
from tests.cuda.emulated import run

TEXTS = (
    "", "banana:1", "max_split_size:128", "Expandable_segments:True", "max_split_size_mb=128",
    "expandable_segments", "expandable_segments:true", "expandable_segments:True", "expandable_segments:[True]",
    "max_split_size_mb:19", "max_split_size_mb:20", "max_split_size_mb:21x", "max_split_size_mb:abc",
    "max_split_size_mb:", "max_split_size_mb:[128]", "max_split_size_mb:99999999999999999999999",
    "max_split_size_mb : 128, expandable_segments:True,", "max_split_size_mb:128 expandable_segments:True",
    "max_split_size_mb:128:5", "max_split_size_mb:128,max_split_size_mb:64", ",expandable_segments:True",
    "max_non_split_rounding_mb:19", "max_non_split_rounding_mb:20",
    "large_segment_size_mb:10", "large_segment_size_mb:11", "large_segment_size_mb:64,max_split_size_mb:32",
    "max_non_split_rounding_mb:32,large_segment_size_mb:64",
    "garbage_collection_threshold:0", "garbage_collection_threshold:1", "garbage_collection_threshold:abc",
    "garbage_collection_threshold:.5", "garbage_collection_threshold:5e-1",
    "roundup_power2_divisions:0", "roundup_power2_divisions:3", "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "roundup_power2_divisions:[256:0,512:2]",
    "roundup_power2_divisions:[300:1]", "roundup_power2_divisions:[256:1", "roundup_power2_divisions:[256:1,]",
    "roundup_power2_divisions:[]", "roundup_power2_divisions:[>:4]", "roundup_power2_divisions:[>:4,256:1]",
    "roundup_power2_divisions:[512:2,256:4]", "roundup_power2_divisions:[65536:8,>:2]",
    "per_process_memory_fraction:1.5", "per_process_memory_fraction:-1", "per_process_memory_fraction:1",
    "backend:native", "backend:other", "throw_on_cudamalloc_oom:x", "throw_on_cudamalloc_oom:True",
    "pinned_reserve_segment_size_mb:0", "pinned_reserve_segment_size_mb:1", "pinned_max_round_threshold_mb:0",
    "pinned_max_cached_size_mb:0", "pinned_num_register_threads:3", "pinned_num_register_threads:8",
    "pinned_num_register_threads:256", "pinned_use_background_threads:yes", "pinned_use_background_threads:True",
    "pinned_use_cuda_host_register:True", "pinned_use_hip_host_register:True", "pinned_free_catch_all:True",
    "release_lock_on_cudamalloc:True", "release_lock_on_hipmalloc:True", "graph_capture_record_stream_reuse:True",
)  # fmt: skip


def ours(text: str) -> AllocatorSettings | None:
    try:
        return parse_settings(text)
    except UsageError:
        return None


def test_strings_are_refused_and_read_as_torch_does() -> None:
    answers = run("allocator_settings", TEXTS)
    assert len(answers) == len(TEXTS)
    for text, kept in zip(TEXTS, answers, strict=True):
        parsed = ours(text)
        assert (parsed is None) == (kept is None), text
        if parsed is not None:
            assert parsed == settings_of(kept), text
    assert answers[TEXTS.index("banana:1")] is None
