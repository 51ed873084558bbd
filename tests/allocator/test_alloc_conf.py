"""``PYTORCH_CUDA_ALLOC_CONF`` is read as the installed torch reads it, and written as torch writes it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from memprof.allocator.alloc_conf import AllocConf, parse_alloc_conf
from memprof.allocator.settings import MIB, UNLIMITED, AllocatorSettings, conf_text, parse_settings, settings_of
from memprof.analysis.analysis import analyze
from memprof.errors import UsageError
from memprof.snapshot.reader import snapshot_from_raw
from tests.snapshot.programs import Program

# The fields are read from the object's memory, which another release may lay out in another way.
like_torch = pytest.mark.skipif(
    not (version("torch").startswith("2.13.") and sys.platform == "linux"), reason="the layout is that of torch 2.13"
)

_NUMBERS = st.one_of(
    st.sampled_from(["0", "1", "10", "11", "12", "19", "20", "21", "64", "-1", "-5", "+64", "0x40", "64MB", "x"]),
    st.sampled_from(["17592186044415", "17592186044416", "18446744073709551615", "18446744073709551616", "", "6 4"]),
    st.integers(0, 100).map(str),
)
_SHARES = st.sampled_from(
    ["0", "1", "0.8", ".5", "5e-1", "1e-400", "1e-310", "0x.8", "0x1p-1", "0x1p-9999", "nan", "inf", "-0.5", "0.5x", ""]
)
_FLAGS = st.sampled_from(["True", "False", "true", "1", "[True]", ""])
_DIVISIONS = st.sampled_from(["0", "1", "2", "3", "4", "8", "16", "x", "-1"])
_BOUNDS = st.sampled_from([">", "0", "1", "2", "64", "256", "1024", "32768", "65536", "300", "x"])
_TABLES = st.lists(st.tuples(_BOUNDS, _DIVISIONS).map(":".join), max_size=4).flatmap(
    lambda rows: st.sampled_from([f"[{','.join(rows)}]", f"[{','.join(rows)},]", f"[{','.join(rows)}", ",".join(rows)])
)
_SIZES = ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb", "pinned_max_cached_size_mb")
_OPTION = st.one_of(
    st.tuples(st.sampled_from(_SIZES), _NUMBERS),
    st.tuples(st.just("garbage_collection_threshold"), _SHARES),
    st.tuples(st.sampled_from(["expandable_segments", "pinned_use_background_threads"]), _FLAGS),
    st.tuples(st.just("roundup_power2_divisions"), st.one_of(_DIVISIONS, _TABLES)),
    st.tuples(st.sampled_from(["foo", "max_split_size", "an option"]), _NUMBERS),
).map(":".join)
_TOKENS = st.lists(
    st.sampled_from([",", ":", "[", "]", " ", "max_split_size_mb", "64", "expandable_segments", "True", ">", "4",
                     "large_segment_size_mb", "roundup_power2_divisions", "garbage_collection_threshold", ".5"]),
    max_size=9,
).map("".join)  # fmt: skip
TEXTS = st.one_of(
    st.lists(_OPTION, max_size=4).map(",".join),
    st.lists(_OPTION, max_size=4).map(" , ".join),
    st.lists(_OPTION, min_size=1, max_size=3).map(lambda options: ",".join(options) + ","),
    _TOKENS,
)


def _ours(text: str) -> list[object] | None:
    try:
        conf = parse_alloc_conf(text, skip_unknown=True)
    except UsageError:
        return None
    return [
        conf.large_segment_size, conf.max_split_size, conf.max_non_split_rounding, conf.roundup_divisions,
        conf.garbage_collection_threshold, conf.expandable_segments,
    ]  # fmt: skip


def _torchs(environments: list[dict[str, str]]) -> list[list[object] | None]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.allocator.libc10_parser"],
        input=json.dumps(environments), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found: list[list[object] | None] = json.loads(done.stdout)
    return found


@like_torch
def test_generated_strings_are_read_as_the_installed_torch_reads_them() -> None:
    """1,000 strings: well-formed ones, near misses and tokens in any order; every field of each is equal."""
    texts: list[str] = []

    @seed(41)
    @settings(max_examples=1000, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    told = _torchs([{"PYTORCH_CUDA_ALLOC_CONF": text} for text in texts])
    assert len(set(texts)) > 500
    assert sum(fields is None for fields in told) > 100, "some have to be refused"
    assert sum(fields is not None and fields != _ours("") for fields in told) > 100, "and some have to set something"
    assert {text: _ours(text) for text in texts} == dict(zip(texts, told, strict=True))


# At the edge of what a double can be: exact subnormal numbers are taken, rounded ones are refused.
_TINIEST = f"{2**-1074:.1074f}"
_EDGES = (
    "0x1p-1074", "0x3p-1074", "0x1p-1075", "0x1.8p-1074", "0x1p-1022", "0x0.8p-1021", "0x0.fffffffffffffp-1022",
    "0x0.fffffffffffff8p-1022", "0x0.fffffffffffffcp-1022", "0x0.fffffffffffffbp-1022",
    "0x0.fffffffffffff7p-1022", "0x1p-1030", "0x1.123p-1060", "0x1.123p-1070", "0x0p-9999",
    "0x", "0x.p3", "0x1p", "0x1p+", "0X1P-1", "1e-310", "1e-323", "4.9406564584124654e-324", "2.2250738585072014e-308",
    "2.2250738585072011e-308", "0e-999", "1e-999", "1e999", "1e", ".5e+", "5.e-1", ".", "+.5", _TINIEST, _TINIEST[:-1],
)  # fmt: skip


@like_torch
def test_numbers_at_the_edge_are_read_as_strtod_reads_them() -> None:
    """``0x1p-1074`` used to be refused."""
    texts = [f"garbage_collection_threshold:{number}" for number in _EDGES]
    told = _torchs([{"PYTORCH_CUDA_ALLOC_CONF": text} for text in texts])
    assert dict(zip(_EDGES, map(_ours, texts), strict=True)) == dict(zip(_EDGES, told, strict=True))
    assert told[0] is not None
    assert told[2] is None


#: Unicode has more white space than C, and size_t fewer digits than Python converts.
_ODD = (
    "\u00a064", "\x1c64", "\x8564", "64\u2003", "\v64\f", "9" * 5000, "0" * 5000 + "64", "-" + "0" * 30 + "64", "00",
)  # fmt: skip


@like_torch
def test_odd_white_space_and_long_numbers_are_read_as_torch_reads_them() -> None:
    """A no-break space used to be dropped, and thousands of digits ended in a ValueError."""
    texts = [f"{name}:{number}" for name in ("max_split_size_mb", "pinned_max_cached_size_mb") for number in _ODD]
    texts += [f"garbage_collection_threshold:{number}" for number in ("0" * 5000 + ".5", "0." + "0" * 5000 + "5e4999")]
    told = _torchs([{"PYTORCH_CUDA_ALLOC_CONF": text} for text in texts])
    assert dict(zip(texts, map(_ours, texts), strict=True)) == dict(zip(texts, told, strict=True))


@like_torch
def test_of_several_variables_the_first_that_is_set_counts_as_in_torch() -> None:
    """Even if it is empty: an empty PYTORCH_CUDA_ALLOC_CONF used to give way to PYTORCH_ALLOC_CONF."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    cases = [
        {name: text for name, text in zip(names, texts, strict=True) if text is not None}
        for texts in itertools.product((None, "", "max_split_size_mb:64", "expandable_segments:True"), repeat=3)
    ]
    found = [_ours(conf_text(case) or "") for case in cases]
    assert found == _torchs(cases)
    empty_first = settings_of({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert (empty_first.max_split_size, empty_first.text) == (UNLIMITED, "")


def test_an_option_that_torch_does_not_have_is_refused_where_a_user_gives_it() -> None:
    with pytest.raises(UsageError, match="torch has no allocator setting foo and raises an error"):
        parse_settings("foo:1")
    assert parse_alloc_conf("foo:1,max_split_size_mb:64", skip_unknown=True) == AllocConf(
        max_split_size=64 * MIB, unknown=["foo"]
    )


def test_a_large_segment_sets_the_rounding_of_unsplit_blocks_too() -> None:
    """What the parser used to leave at 20 MiB: 100 MiB freed, 70 MiB asked for, and 60 MiB of rounding allowed."""
    read = parse_settings("max_split_size_mb:64,large_segment_size_mb:60")
    assert read.max_non_split_rounding == 60 * MIB
    assert parse_settings("large_segment_size_mb:12,max_split_size_mb:15").max_split_size == 15 * MIB


_SETTINGS = st.builds(
    AllocatorSettings,
    max_split_size=st.sampled_from([UNLIMITED, 64 * MIB]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.8]),
    expandable_segments=st.booleans(),
    roundup_divisions=st.lists(st.sampled_from([0, 1, 2, 8]), min_size=16, max_size=16).map(tuple),
    oldest_first=st.booleans(),
)


@given(_SETTINGS)
def test_what_a_snapshot_is_given_is_read_back(one: AllocatorSettings) -> None:
    assert settings_of(one.to_snapshot()) == one


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_recording_s_text_is_read_under_each_of_torch_s_names(variable: str) -> None:
    text = "max_split_size_mb:64,max_non_split_rounding_mb:512,large_segment_size_mb:64,roundup_power2_divisions:4"
    read = settings_of({variable: text, "max_cached_size": -1})
    assert read == parse_settings(text)
    assert read.segment_size(2 * MIB) == 64 * MIB


def test_a_key_of_a_recording_wins_over_its_text() -> None:
    """torch writes under the key what is in effect: a platform may not have what the text asks for."""
    recorded = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64", "max_split_size": -1}
    assert settings_of({**recorded, "expandable_segments": False}) == AllocatorSettings(oldest_first=False)


def test_what_is_not_modelled_in_a_recording_is_a_note_where_the_reader_looks() -> None:
    text = "pinned_reserve_segment_size_mb:64,max_split_size_mb:64,backend:cudaMallocAsync"
    notes = settings_of({"PYTORCH_CUDA_ALLOC_CONF": text}).notes
    assert [note.partition(" is not modelled: ")[0] for note in notes] == [
        "The allocator setting pinned_reserve_segment_size_mb:64",
        "The allocator setting backend:cudaMallocAsync",
    ]
    raw = Program(AllocatorSettings()).run([("malloc", 512, 0, 0)]).raw()
    raw["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": text}
    told = analyze(snapshot_from_raw(raw)).report.notes
    assert [note for note in told if "is not modelled" in note] == list(notes)


def test_what_cannot_be_read_in_a_recording_is_a_note() -> None:
    (note,) = settings_of({"PYTORCH_CUDA_ALLOC_CONF": "new_option:1,max_split_size_mb:64"}).notes
    assert "does not know the recording's allocator setting new_option" in note
    broken = settings_of({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb", "expandable_segments": True})
    assert broken.expandable_segments
    assert "cannot be read" in broken.notes[0]
    for odd in (None, 3, ["x"], {"1": 3}, float("nan"), True):
        keys = ("max_split_size", "garbage_collection_threshold", "roundup_power2_divisions", "PYTORCH_ALLOC_CONF")
        assert settings_of(dict.fromkeys(keys, odd)) == AllocatorSettings(oldest_first=False)


def test_a_memory_fraction_is_bytes_of_a_device() -> None:
    read = parse_settings("per_process_memory_fraction:0.5,garbage_collection_threshold:0.8")
    assert (read.notes, read.allowed_bytes) == ((), None)
    assert read.on_device(24 * 10**9).allowed_bytes == 12 * 10**9
    assert read.on_device(None).allowed_bytes is None
    assert parse_settings("per_process_memory_fraction:1.0").on_device(24 * 10**9).allowed_bytes is None
