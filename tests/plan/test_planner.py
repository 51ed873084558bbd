"""The search over simulations: with a run's memory known in advance, it ends where it must."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from memprof.reports.document.plan import PlanDocument
from memprof.reports.html.plan import render_plan as render_page
from memprof.reports.renderers import draw

from memprof.config.fits import MARGIN
from memprof.config.settings import Settings
from memprof.config.to_trl_config import as_python, as_yaml
from memprof.errors import UsageError
from memprof.plan import cache, make_plan, planner, search, sizes
from memprof.plan.methods import METHODS, methods_for
from memprof.plan.pareto_front import fastest_of, front_of
from memprof.plan.planner import MethodPlan
from memprof.plan.simulations import Changes, SimulatedRow, SizeChoices
from memprof.report.codec import to_builtins
from tests.plan.rows import simulated_row
from tests.report.files import validate
from tests.reports.typed import build_plan

GB = 10**9


class _Known:
    """Answers as a simulation would, by a formula: bytes for the method, and bytes for each token of the batch."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.executed = 0
        self.asked: list[Settings] = []

    def expect(self, simulations: int) -> None:
        self.expected = simulations

    def run(
        self,
        wanted: list[Settings],
        sizes: list[SizeChoices] | None = None,
        done: Callable[[int, SimulatedRow], None] | None = None,
    ) -> list[SimulatedRow]:
        self.asked += wanted
        asked = sizes or [None] * len(wanted)
        pairs = zip(wanted, asked, strict=True)
        rows = [msgspec.structs.replace(self._one(s), largest=self._largest(of_it)) for s, of_it in pairs]
        for index, row in enumerate(rows):
            if done is not None:
                done(index, row)
        return rows

    def _largest(self, sizes: SizeChoices | None) -> Changes | None:
        """Choose as resizing the run would, which here is as exact as simulating it."""
        if sizes is None:
            return None
        of = Settings.from_dict(sizes.of)
        first = self._last(of, sizes.first)
        return None if first is None else self._last(of, [{**first, **more} for more in sizes.more]) or first

    def _last(self, of: Settings, changes: Sequence[Changes]) -> Changes | None:
        place = bisect_left(changes, True, key=lambda one: not self._one(of.with_(**one)).fits)
        return changes[place - 1] if place else None

    def _one(self, s: Settings) -> SimulatedRow:
        from memprof.config.gpus import find_gpu

        fixed = 30 * GB if s.lora_r is None else 5 * GB if s.load_in_4bit else 12 * GB
        token = (40_000 if s.recipe == "lean" else 400_000) if s.gradient_checkpointing else 4_000_000
        need = fixed + token * s.sequence_length * s.per_device_train_batch_size
        return simulated_row(
            fits=need * (1 + MARGIN) <= find_gpu(self.gpu).total_bytes,
            peak_bytes=need,
            device_peak_bytes=need,
            categories={"activations": need},
            verdict={"limit_bytes": int(find_gpu(self.gpu).total_bytes / (1 + MARGIN))},
        )


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[_Known]:
    made: list[_Known] = []

    @contextmanager
    def runner(gpu: str, **_: Any) -> Iterator[_Known]:
        made.append(_Known(gpu))
        yield made[-1]

    monkeypatch.setattr(planner, "runner", runner)
    for module in (sizes, planner):
        monkeypatch.setattr(module, "find_config", lambda _: {"max_position_embeddings": 131_072})
    return made


def _base(**changes: Any) -> Settings:
    return Settings(**{"model": "m", "num_generations": 8, "per_device_train_batch_size": 8, **changes})


def test_the_longest_context_is_found_and_executed(known: list[_Known]) -> None:
    plan = make_plan(_base(), "24GB")
    assert plan.best is not None
    assert plan.best.method == "QLoRA, lean trainer"  # not the first method that fits: the one that takes the most
    assert plan.best.settings in known[0].asked
    most = (24 * GB / (1 + MARGIN) - 5 * GB) / (40_000 * 8)
    assert 0.9 * most < plan.best.settings.sequence_length <= most


def test_every_method_has_its_own_longest(known: list[_Known]) -> None:
    plan = make_plan(_base(), "24GB")
    fixed = {
        "LoRA + checkpointing": (12, 400_000),
        "QLoRA + checkpointing": (5, 400_000),
        "LoRA, lean trainer": (12, 40_000),
    }
    for row in plan.rows:
        if row.method in fixed:
            floor, token = fixed[row.method]
            assert row.largest is not None
            assert row.largest.fits
            assert 0.9 < row.largest.settings.sequence_length / ((24 / (1 + MARGIN) - floor) * GB / (token * 8)) <= 1
    assert plan.rows[0].largest is None  # full fine-tuning does not fit at any length
    shown = build_plan(to_builtins(plan.answer()))
    at = [column.title for column in shown.table.columns].index("Longest completion")
    assert shown.table.lines[0].cells[at] == "none"


def test_a_search_ends_where_the_card_is_nearly_full(known: list[_Known]) -> None:
    """Memory is linear here: four times the context, then where the line meets the card; nothing after that."""
    plan = make_plan(_base(), "24GB")
    assert plan.best is not None
    assert plan.best.device_peak_bytes >= 0.97 * planner.limit_of("24GB")
    lengths = [s.sequence_length for s in known[0].asked if s.recipe == "lean" and s.load_in_4bit]
    assert len(lengths) <= 4
    assert known[0].expected >= len(known[0].asked)


def test_a_context_is_not_longer_than_the_model_was_made_for(
    known: list[_Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "find_config", lambda _: {"max_position_embeddings": 4096})
    plan = make_plan(_base(), "80GB")
    assert plan.best is not None
    assert plan.best.settings.sequence_length == 4096
    assert any("the search ended at 4096 tokens" in note for note in plan.notes)
    # Several methods reach it: the first of them trains the most.
    assert plan.best.method == next(
        r.method for r in plan.rows if r.largest and r.largest.settings.sequence_length == 4096
    )


@pytest.mark.parametrize(
    ("config", "most", "why"),
    [
        ({"text_config": {"max_position_embeddings": 4096}}, 4096, "4096 tokens: the model doesn't support more"),
        ({"n_positions": 1024}, 1024, "1024 tokens: the model doesn't support more"),
        ({"max_position_embeddings": 1000}, 960, "1000 tokens: the model doesn't support more"),
        ({"max_position_embeddings": 262_144}, 131_072, "131072 tokens: none is longer"),
        ({"n_positions": 512}, None, "sequences of 768 tokens are longer than this model's positions reach (512"),
    ],
)
def test_a_search_says_where_it_ends(
    known: list[_Known], monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], most: int | None, why: str
) -> None:
    monkeypatch.setattr(sizes, "find_config", lambda _: config)
    monkeypatch.setattr(planner, "find_config", lambda _: config)
    plan = make_plan(_base(), "B200")
    longest = max(row.largest.settings.sequence_length for row in plan.rows if row.largest)
    assert longest == (most or _base().sequence_length)
    assert sum("search ended" in note for note in plan.notes) == (most is not None)
    assert any(why in note for note in plan.notes)


@pytest.mark.parametrize(("what", "why"), [("num_generations", "256 generations"), ("batch", "1024 in a micro-batch")])
def test_other_searches_say_where_they_end(known: list[_Known], what: str, why: str) -> None:
    ended = f"the search ended at {why}"
    assert ended in make_plan(_base(prompt_length=8, completion_length=8), "B200", maximize=what).notes
    assert ended not in make_plan(_base(prompt_length=2000, completion_length=3000), "24GB", maximize=what).notes


@pytest.mark.parametrize(
    ("changes", "step", "most"),
    [
        ({}, 8, 1024),
        ({"gradient_accumulation_steps": 16, "per_device_train_batch_size": 4}, 1, 256),
        ({"gradient_accumulation_steps": 16, "steps_per_generation": 2, "num_generations": 6}, 3, 1023),
        ({"gpus": 4}, 2, 1024),
        ({"gpus": 4, "sharding": "tp"}, 8, 1024),
    ],
)
def test_micro_batches_are_all_that_trl_takes(changes: dict[str, Any], step: int, most: int) -> None:
    """Those of which a generation is a multiple of num_generations; ``Settings`` refuses the others."""
    base = _base(**{"per_device_train_batch_size": 24, **changes})
    tried = [base.with_(**each).per_device_train_batch_size for each in sizes.choices(base, "batch").first]
    assert tried == list(range(step, most + 1, step))
    assert all(n in tried for n in range(1, most) if _is_taken(base, n))
    less = sizes.step_back(base.with_(per_device_train_batch_size=10 * step), "batch")
    assert less is not None
    assert less.per_device_train_batch_size == 9 * step
    assert sizes.step_back(base.with_(per_device_train_batch_size=step), "batch") is None


def _is_taken(base: Settings, size: int) -> bool:
    try:
        base.with_(per_device_train_batch_size=size)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("what", ["num_generations", "batch"])
def test_other_things_can_be_maximised(known: list[_Known], what: str) -> None:
    plan = make_plan(_base(), "24GB", maximize=what)
    assert plan.best is not None
    assert plan.best.fits
    size = plan.best.settings.per_device_train_batch_size
    assert size > 8
    assert size % plan.best.settings.num_generations == 0


def test_where_nothing_fits_the_micro_batch_is_divided(known: list[_Known]) -> None:
    base = _base(prompt_length=2000, completion_length=3000)
    plan = make_plan(base, "12GB", fixed={"gradient_checkpointing", "recipe"})
    assert not any(row.fits for row in plan.rows)
    assert plan.best is not None
    best = plan.best.settings
    assert best.per_device_train_batch_size * best.gradient_accumulation_steps == 8
    assert best.generation_steps * best.per_device_train_batch_size == 8


def test_nothing_is_said_to_fit_that_does_not(known: list[_Known]) -> None:
    plan = make_plan(_base(), "4GB")
    assert plan.best is None
    assert "Nothing tried fits" in draw("plan", _document(plan))


def test_what_the_user_fixed_stays(known: list[_Known]) -> None:
    plan = make_plan(_base(lora_r=64), "24GB", fixed={"lora_r"})
    assert plan.rows
    assert all(row.settings.lora_r == 64 for row in plan.rows)
    plan = make_plan(_base(optim="sgd"), "24GB", fixed={"optim"})
    assert {row.settings.optim for row in plan.rows} == {"sgd"}


@pytest.mark.parametrize(
    ("given", "names", "left"),
    [
        (
            {"gpus": 2, "sharding": "fsdp2"},
            ["full", "full + checkpointing", "full, bfloat16", "full, bfloat16 + checkpointing", "LoRA",
             "LoRA + checkpointing", "LoRA, lean trainer"],
            ["QLoRA + checkpointing, QLoRA, lean trainer (--load-in-4bit with --sharding fsdp2"],
        ),
        (
            {"gpus": 2, "sharding": "tp"},
            ["full", "full + checkpointing", "full, bfloat16", "full, bfloat16 + checkpointing"],
            ["LoRA, LoRA + checkpointing, QLoRA + checkpointing, LoRA, lean trainer, QLoRA, lean trainer (--sharding"],
        ),
        (
            {"optim": "sgd", "gradient_checkpointing": False},
            ["full", "full, bfloat16", "LoRA"],
            [],
        ),
        ({"optim": "sgd", "dtype": "bfloat16", "recipe": "trl"},
         ["full", "full + checkpointing", "LoRA", "LoRA + checkpointing", "QLoRA + checkpointing"], []),
        ({"optim": "paged_adamw_8bit", "recipe": "trl", "gradient_checkpointing": False},
         ["full", "full + 8-bit Adam", "LoRA"], []),
        ({"load_in_4bit": True, "lora_r": 8}, ["QLoRA", "QLoRA + checkpointing", "QLoRA, lean trainer"], []),
    ],
)  # fmt: skip
def test_methods_are_named_after_what_they_are(
    known: list[_Known], given: dict[str, Any], names: list[str], left: list[str]
) -> None:
    plan = make_plan(_base(**given), "80GB", fixed=set(given), search=False)
    assert [row.method for row in plan.rows] == names
    told = [note.removeprefix("left out: ") for note in plan.notes if note.startswith("left out")]
    assert len(told) == len(left)
    assert all(words.startswith(begin) for words, begin in zip(told, left, strict=True))


def test_methods_are_distinct() -> None:
    rows = methods_for(_base(), set())
    assert len(rows) == len(METHODS)
    assert len({repr(settings) for _, settings in rows}) == len(rows)


@pytest.mark.parametrize("recipe", ["trl", "lean"])
@pytest.mark.parametrize("kind", [True, "full", "selective"])
def test_a_kind_of_checkpointing_refines_the_methods_that_have_one(recipe: str, kind: Any) -> None:
    rows = methods_for(_base(recipe=recipe, gradient_checkpointing=kind), {"gradient_checkpointing"})
    names = {m.name for m in METHODS if m.settings["gradient_checkpointing"]}
    # Under the lean recipe "LoRA + checkpointing" is the lean trainer's.
    assert {method.name for method, _ in rows} == names - (
        {"LoRA, lean trainer", "QLoRA, lean trainer"} if recipe == "lean" else set()
    )
    assert all(s.checkpointing in (kind, "full", "auto") for _, s in rows)
    if kind == "selective":
        assert {s.checkpointing for _, s in rows} == {"selective"}


def test_values_are_varied(known: list[_Known]) -> None:
    plan = make_plan(_base(), "24GB", vary=("num_generations", [2, 4, 16]))
    assert [row.settings.num_generations for row in plan.rows] == [2, 4, 16]
    with pytest.raises(UsageError, match="no such setting"):
        make_plan(_base(), "24GB", vary=("colour", [1]))
    for wrong, why in ((0, "at least 1"), ("a", "whole number")):
        with pytest.raises(UsageError, match=why):
            make_plan(_base(), "24GB", vary=("num_generations", [wrong]))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("sequence_length", 512, "no such setting"),  # a property
        ("with_", 1, "no such setting"),
        ("device", "cpu", "a plan is for a GPU"),
        ("gpu", "H100", "run one plan for each"),
        ("beta", "abc", "give a number"),
        ("lora_r", "none", "give a whole number"),
        ("load_in_4bit", "yes", "give true or false"),
        ("trainer", "sft", "ask memprof simulate"),
    ],
)
def test_what_cannot_be_varied_is_refused(known: list[_Known], name: str, value: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make_plan(_base(), "24GB", vary=(name, [value]))


def test_a_varied_trainer_has_its_own_defaults(known: list[_Known]) -> None:
    varied = ("trainer", ["grpo", "rloo"])
    assert [row.settings.beta for row in make_plan(_base(), "24GB", vary=varied).rows] == [0.0, 0.05]
    rloo = _base(trainer="rloo", beta=0.05)
    assert [row.settings.beta for row in make_plan(rloo, "24GB", vary=varied).rows] == [0.0, 0.05]
    fixed = make_plan(_base(beta=0.1), "24GB", vary=varied, fixed={"beta"})
    assert [row.settings.beta for row in fixed.rows] == [0.1, 0.1]


def test_modules_of_an_adapter_are_varied_one_by_one(known: list[_Known]) -> None:
    plan = make_plan(_base(lora_r=8), "24GB", vary=("lora_target_modules", ["q_proj", "all-linear"]))
    assert [row.settings.lora_target_modules for row in plan.rows] == [("q_proj",), ("all-linear",)]


def test_a_card_without_bfloat16_is_said_to_fail_in_it(known: list[_Known]) -> None:
    plan = make_plan(_base(), "T4", fixed={"mixed_precision"})
    assert any("gemm input type" in note for note in plan.notes)
    document = _document(plan)
    for shown in (draw("plan", document, width=80), draw("plan", document, "markdown"), render_page(document)):
        assert "gemm input type" in " ".join(shown.split())
    assert not any("bfloat16" in note for note in make_plan(_base(), "RTX 4090").notes)


def test_a_card_without_bfloat16_is_planned_in_fp16(known: list[_Known]) -> None:
    plan = make_plan(_base(), "T4")
    dtypes = {(row.settings.lora_r is not None, row.settings.dtype) for row in plan.rows}
    assert dtypes == {(False, "float32"), (True, "float16")}
    assert {row.settings.mixed_precision for row in plan.rows} == {"fp16"}
    assert sum("rows are in fp16, with a loss scaler" in note for note in plan.notes) == 1
    assert not any("gemm input type" in note for note in plan.notes)
    four_bit = next(row.settings for row in plan.rows if row.settings.load_in_4bit)
    assert "bnb_4bit_compute_dtype='float16'" in as_python(four_bit)
    assert "fp16=True" in as_python(four_bit)
    varied = make_plan(_base(), "T4", vary=("num_generations", [2]))
    assert {row.settings.mixed_precision for row in varied.rows} == {"fp16"}
    for kept in ({"dtype"}, {"mixed_precision"}):
        assert {row.settings.mixed_precision for row in make_plan(_base(), "T4", fixed=kept).rows} == {"bf16"}


def test_what_is_not_simulated_in_fp16_stays_in_bfloat16(known: list[_Known]) -> None:
    sharded = make_plan(_base(gpus=2), "T4", vary=("sharding", ["ddp", "fsdp2"]))
    assert [row.settings.mixed_precision for row in sharded.rows] == ["fp16", "bf16"]
    varied = make_plan(_base(), "T4", vary=("mixed_precision", ["bf16", "no"]))
    assert [row.settings.mixed_precision for row in varied.rows] == ["bf16", "no"]
    names = [row.method for row in make_plan(_base(optim="sgd"), "T4", fixed={"optim"}).rows]
    assert "full + checkpointing" in names
    assert not any("bfloat16" in name for name in names)


def test_one_of_several_numbers_of_gpus_may_be_one(known: list[_Known]) -> None:
    """One GPU has nothing to divide."""
    plan = make_plan(_base(gpus=4, sharding="fsdp2"), "24GB", vary=("gpus", [1, 4]))
    assert [(row.settings.gpus, row.settings.sharding) for row in plan.rows] == [(1, "ddp"), (4, "fsdp2")]


def _configurations(code: str) -> dict[str, Any]:
    """Run the part of a program that makes configurations, each as a dict."""
    kinds = ("GRPOConfig", "LeanGRPOConfig", "LoraConfig", "BitsAndBytesConfig")
    names: dict[str, Any] = dict.fromkeys(kinds, dict)
    _, _, body = code.partition("\n\n")
    exec(body.partition("\ntrainer = ")[0], names)
    return names


def test_a_configuration_can_be_pasted(known: list[_Known]) -> None:
    plan = make_plan(_base(), "24GB")
    assert plan.best is not None
    code = as_python(plan.best.settings)
    names = _configurations(code)
    assert names["args"]["max_completion_length"] == plan.best.settings.completion_length
    assert names["peft_config"]["r"] == 16
    assert code in draw("plan", _document(plan), "markdown")
    assert code in draw("plan", _document(plan))
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(as_yaml(plan.best.settings))["num_generations"] == 8


def test_the_lean_trainers_configuration_is_its_own(known: list[_Known]) -> None:
    row = next(row for row in make_plan(_base(), "24GB").rows if row.settings.recipe == "lean")
    for kind in ("auto", "full", "none", "selective"):
        plain = replace(row, settings=row.settings.with_(gradient_checkpointing=kind))
        names = _configurations(as_python(plain.settings))
        assert names["args"]["checkpointing"] == kind  # what was simulated, by the trainer's own name
        assert "wrap the model" not in as_python(plain.settings)
    assert row.settings.checkpointing == "auto"
    row = replace(row, settings=row.settings.with_(tiled_mlp=2048, gradient_checkpointing="offloaded"))
    names = _configurations(as_python(row.settings))
    assert names["args"]["checkpointing"] == "offloaded"
    assert names["args"]["tiled_mlp"] == 2048
    assert "generation_batch" not in names["args"]


def test_no_result_is_kept_where_that_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MEMPROF_CACHE", "0")
    cache.store("a-key", simulated_row())
    assert cache.load("a-key") is None
    assert list(tmp_path.iterdir()) == []
    assert cache.cache_folder() == tmp_path / "cache" / "memprof" / "plan"


def test_results_are_kept_by_what_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "deep" / "folder"))
    base = _base().to_dict()
    key = cache.key_of(base, {"hidden_size": 1}, "24GB")
    assert cache.load(key) is None
    cache.store(key, simulated_row(fits=True))
    assert cache.load(key) == simulated_row(fits=True)
    others = {
        cache.key_of({**base, "beta": 0.5}, {"hidden_size": 1}, "24GB"),
        cache.key_of(base, {"hidden_size": 2}, "24GB"),
        cache.key_of(base, {"hidden_size": 1}, "80GB"),
    }
    assert key not in others
    assert len(others) == 3
    (tmp_path / "deep" / "folder" / f"{key}.json").write_text("{")
    assert cache.load(key) is None


def _document(plan: MethodPlan) -> PlanDocument:
    code = as_python(plan.best.settings) if plan.best else None
    return PlanDocument(msgspec.structs.replace(plan.answer(), code=code))


def test_a_plan_is_drawn(known: list[_Known]) -> None:
    plan = make_plan(_base(), "24GB", vary=("num_generations", [2, 4, 64]))
    rows = [replace(row, categories={"weights": GB, "activations": row.peak_bytes - GB}) for row in plan.rows]
    document = _document(replace(plan, rows=rows, model="<b>m"))
    validate(to_builtins(document.plan))
    page = render_page(document)
    assert "<b>m" not in page
    boxes = [float(w) for w in re.findall(r'class="seg c-activations" style="width:([\d.]+)%"', page)]
    assert len(boxes) == 3
    assert boxes == sorted(boxes)  # the growth is drawn to one scale
    assert boxes[2] / boxes[0] == pytest.approx(
        rows[2].categories["activations"] / rows[0].categories["activations"], rel=0.02
    )
    drawn = draw("plan", document)
    drawn = drawn[drawn.rindex("\n\nnum_generations") :]
    lengths = [line.count("X") for line in drawn.splitlines() if line.startswith("num_generations")]
    assert len(lengths) == 3
    assert lengths == sorted(lengths)
    assert "may be used" in drawn
    assert "If these settings are what runs" in draw("plan", document)


def _timed(method: str, gib: float, seconds: float | None, fits: bool = True, **changes: Any) -> search.SearchRow:
    need = int(gib * 2**30)
    settings = _base(**changes)
    return search.SearchRow(method, settings, fits, need, need, 0, "weights", "backward", step_s=seconds)


def test_the_largest_value_that_fits_is_no_smaller_one_that_needs_more() -> None:
    steps = "gradient_accumulation_steps"
    rows = [_timed(f"{steps}={n}", gib, None, **{steps: n}) for n, gib in ((2, 12), (4, 11))]
    rows.append(_timed(f"{steps}=8", 30, None, fits=False, **{steps: 8}))
    assert planner._largest_value(rows, steps) is rows[1]
    plan = MethodPlan("model", "24GB", rows, rows[1], "context", 3, [])
    assert plan.answer().headline.action.startswith(f"Largest value that fits ({steps}=4): ")
    words = [_timed(f"attn={name}", gib, None, attn=name) for name, gib in (("math", 12), ("flash", 11))]
    assert planner._largest_value(words, "attn") is words[0]
    assert planner._largest_value([], "attn") is None


def test_the_front_leaves_out_what_is_slower_and_larger() -> None:
    rows = [
        _timed("fast", 60, 20.0, fits=False),
        _timed("middle", 20, 30.0),
        _timed("worse", 21, 31.0),
        _timed("small", 10, 40.0),
    ]
    assert front_of(rows) == [True, True, False, True]
    assert fastest_of(rows) is rows[1]
    assert front_of([_timed("no speed", 10, None), rows[1]]) == [None, True]
    assert fastest_of([_timed("no speed", 10, None), rows[0]]) is None
    # What does not fit takes nothing that fits off the front.
    assert front_of([_timed("refused", 10, 5.0, fits=False), _timed("taken", 11, 6.0)]) == [True, True]


def test_of_a_tie_the_first_is_the_fastest() -> None:
    rows = [_timed("slow", 20, 34.0), _timed("trains more", 12, 32.0), _timed("rounds", 8, 30.0)]
    assert fastest_of(rows) is rows[1]


def test_steps_of_other_work_are_compared_by_their_tokens() -> None:
    rows = [_timed("short", 10, 10.0), _timed("long", 10, 18.0, per_device_train_batch_size=16)]
    assert fastest_of(rows) is rows[1]


def test_speed_is_maximised_with_smaller_micro_batches(known: list[_Known], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formula LoRA without checkpointing is the fastest and fits in smaller micro-batches only."""
    with pytest.raises(UsageError, match=r"needs a known GPU model.*got 40GB"):
        make_plan(_base(), "40GB", maximize="speed")

    def took(self: _Known, s: Settings) -> SimulatedRow:
        seconds = 10 + 5 * bool(s.gradient_checkpointing) + 9 * s.load_in_4bit
        return msgspec.structs.replace(one(self, s), step_s=seconds)

    one = _Known._one
    monkeypatch.setattr(_Known, "_one", took)
    plan = make_plan(_base(), "4090", maximize="speed")
    assert plan.best is not None
    assert plan.best == plan.fastest
    assert not next(r for r in plan.rows if r.method == "LoRA").fits
    assert plan.best.method == "LoRA"
    smaller = plan.best.settings
    assert smaller.per_device_train_batch_size < 8
    assert smaller.per_device_train_batch_size * smaller.gradient_accumulation_steps == 8
    assert smaller.sequence_length == _base().sequence_length
    data = to_builtins(plan.answer())
    validate(data)
    shown = build_plan(data)
    assert shown.headline.action.startswith("Fastest found (LoRA): ")
    assert "Micro-batch that fits" in [column.title for column in shown.table.columns]


def test_a_search_for_speed_shortens_nothing(known: list[_Known], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with shorter completions is another one, however fast; here resizing says that the least may fit."""
    one = _Known._one
    monkeypatch.setattr(_Known, "_one", lambda self, s: msgspec.structs.replace(one(self, s), step_s=9.0))
    monkeypatch.setattr(_Known, "_largest", lambda self, of_it: None if of_it is None else of_it.first[0])
    base = _base(prompt_length=128, completion_length=20_000, per_device_train_batch_size=2, num_generations=2)
    plan = make_plan(base, "4090", maximize="speed", fixed={"recipe", "gradient_checkpointing"})
    assert {s.completion_length for s in known[0].asked} == {20_000}
    assert all(s.per_device_train_batch_size * s.gradient_accumulation_steps == 2 for s in known[0].asked)
    assert any(s.per_device_train_batch_size == 1 for s in known[0].asked)
    assert {row.largest.settings.completion_length for row in plan.rows if row.largest} == {20_000}
    assert plan.best == plan.fastest


def test_without_a_search_stock_trl_that_trains_the_most_is_recommended(
    known: list[_Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _Known._one
    monkeypatch.setattr(
        _Known, "_one", lambda self, s: msgspec.structs.replace(one(self, s), step_s=9.0 if s.load_in_4bit else 12.0)
    )
    rows: list[search.SearchRow] = []
    plan = make_plan(_base(), "4090", maximize=None, on_row=rows.append)
    fitting = [row for row in plan.rows if row.fits and not row.settings.lean]
    assert plan.best is not None
    assert not plan.best.settings.lean
    trained = [(not row.settings.has_adapter, not row.settings.load_in_4bit) for row in fitting]
    best = plan.best.settings
    assert (not best.has_adapter, not best.load_in_4bit) == max(trained)
    assert all(row.largest is None for row in plan.rows)
    assert sorted(row.method for row in rows) == sorted(row.method for row in plan.rows)


@pytest.mark.parametrize(
    ("fits", "recommended"),
    [
        (("full", "LoRA", "QLoRA", "LoRA, lean trainer"), "full"),
        (("full", "full + 8-bit Adam", "LoRA"), "full"),
        (("full + 8-bit Adam", "LoRA"), "full + 8-bit Adam"),
        (("LoRA", "LoRA + checkpointing", "QLoRA", "LoRA, lean trainer"), "LoRA + checkpointing"),
        (("QLoRA", "LoRA, lean trainer"), "QLoRA"),
        (("LoRA, lean trainer",), "LoRA, lean trainer"),
        ((), None),
    ],
)
def test_what_is_recommended(fits: tuple[str, ...], recommended: str | None) -> None:
    from memprof.plan.pareto_front import recommended_of

    settings: dict[str, dict[str, Any]] = {
        "full": {}, "full + 8-bit Adam": {"dtype": "bfloat16", "optim": "adamw_8bit"}, "LoRA": {"lora_r": 16},
        "LoRA + checkpointing": {"lora_r": 16}, "QLoRA": {"lora_r": 16, "load_in_4bit": True},
        "LoRA, lean trainer": {"lora_r": 16, "recipe": "lean"},
    }  # fmt: skip
    seconds = {
        "full": 9.0, "full + 8-bit Adam": 5.0, "LoRA": 12.0, "LoRA + checkpointing": 6.0, "QLoRA": 5.0,
        "LoRA, lean trainer": 4.0,
    }  # fmt: skip
    rows = [_timed(name, 10, seconds[name], name in fits, **changes) for name, changes in settings.items()]
    found = recommended_of(rows)
    assert (found and found.method) == recommended


def test_what_is_varied_is_said_and_each_row_is_shown_by_its_own_margin(known: list[_Known]) -> None:
    plan = make_plan(_base(), "24GB", vary=("num_generations", [2, 4, 16]))
    shown = draw("plan", _document(plan), width=80)
    assert "Varied: num_generations, and per_device_train_batch_size with it. All other" in shown
    assert "settings are the same in every row." in shown
    assert shown.count("Varied:") == 1
    assert "Note: the step was executed on fake tensors;" in shown
    assert "never compared may use" not in shown
    less = replace(plan.rows[1], limit_bytes=20 * 2**30)
    told = _document(replace(plan, rows=[plan.rows[0], less, plan.rows[2]]))
    assert told.plan.limit_bytes == plan.rows[0].limit_bytes
    assert told.room == "Rows with a part that was never compared may use less: 20.00 GiB by num_generations=4."
    assert "may use less: 20.00 GiB" in draw("plan", told)
    assert told.room in told.notes
    validate(to_builtins(told.plan))
    every = _document(replace(plan, rows=[less]))
    assert every.plan.limit_bytes == 20 * 2**30
    assert not every.room
