"""The lean trainer's own step, simulated; and the ladder of its settings, searched for a budget."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memprof.config.catalogue import find_config
from memprof.config.fits import MARGIN
from memprof.config.settings import Settings
from memprof.errors import DoesNotFit, UsageError
from memprof.plan.budget_search import CHOSEN, Tried, _piece_tokens, choose, cost_of, ladder, sentences
from memprof.plan.simulations import SimulatedRow
from memprof.simulate.trainer.recipes import config_of
from tests.plan.rows import simulated_row
from tests.simulate.conftest import TINY
from tests.simulate.test_closed_forms import KV, LORA, PARAMETERS, ROPE, R, _analysis, _requested
from tests.simulate.test_closed_forms import L as LAYERS

GIB = 2**30
CONTEXT = GIB // 2


# -- the recipe ------------------------------------------------------------------------------------------------------


def test_the_lean_step_holds_what_arithmetic_says(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(lora_r=R, dtype="bfloat16", recipe="lean", generation_batch=2)
    found = _analysis(settings)
    assert _requested(found, "weights") == 2 * PARAMETERS + ROPE
    assert _requested(found, "adapters") == 4 * LORA
    assert _requested(found, "optimizer_state") == 8 * LORA
    # Four sequences in a pool of the tokens of two, less what is gathered of a layer; one slot more is the padding's.
    gathered = 2 * settings.sequence_length * LAYERS // 4
    slots = 2 * settings.sequence_length - gathered // LAYERS
    assert _requested(found, "kv_cache") == 2 * KV * 2 * LAYERS * (slots + 1)


def test_pieces_hold_less_than_trls_micro_batch(settings_for: Callable[..., Any]) -> None:
    same = settings_for(
        dtype="bfloat16", generation="none", lora_r=R, gradient_checkpointing=False, prompt_length=30,
        completion_length=200,
    )  # fmt: skip
    theirs, ours = _analysis(same), _analysis(same.with_(recipe="lean", max_tokens_per_piece=230))
    assert ours.peak.allocated_bytes < theirs.peak.allocated_bytes
    held = [sum(found.peak.categories[name] for name in ("activations", "loss_logits")) for found in (theirs, ours)]
    assert held[1] < 0.25 * held[0]


def test_what_the_trainer_leaves_to_trl_where_a_run_is_sharded(settings_for: Callable[..., Any]) -> None:
    """Sharded, the reference is on the devices; under ZeRO-3 the step is TRL's own, and holds what TRL's holds."""
    same = settings_for(
        dtype="bfloat16", generation="none", gpus=2, sharding="zero3", beta=0.04, gradient_checkpointing=False,
        prompt_length=30, completion_length=200,
    )  # fmt: skip
    theirs, ours = _analysis(same), _analysis(same.with_(recipe="lean"))
    for name in ("reference_model", "activations", "loss_logits"):
        assert ours.own_peaks[name] == theirs.own_peaks[name] > 0, name
    for sharding in ("fsdp2", "zero1", "zero2"):
        told = config_of(same.with_(recipe="lean", sharding=sharding))
        assert (told["reference"], told["micro_splitting"]) == ("device", True)
    assert "reference" not in config_of(same.with_(recipe="lean", sharding="ddp"))


@pytest.mark.parametrize("kind", ["none", "auto", "full", "selective", "offloaded"])
def test_a_kind_of_checkpointing_is_the_trainers_own(kind: str) -> None:
    lean, trl = (Settings("m", recipe=recipe, gradient_checkpointing=kind) for recipe in ("lean", "trl"))
    assert config_of(lean)["checkpointing"] == lean.checkpointing == kind
    assert trl.checkpointing == ("full" if kind == "auto" else kind)
    assert Settings("m", recipe="lean").checkpointing == "auto"
    assert lean.with_(beta=0.1).checkpointing == kind
    assert Settings(**{**lean.to_dict(), "lora_target_modules": ("all-linear",)}) == lean


@pytest.mark.parametrize(
    "given", [{"max_tokens_per_piece": 9}, {"tiled_mlp": 9}, {"generation_batch": 1}, {"prefix_sharing": True}]
)
def test_lean_settings_are_refused_elsewhere(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="add --recipe lean"):
        Settings("m", **given)


def test_a_reference_stays_in_host_memory(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 5}))
    same = settings_for(model=str(tmp_path), dtype="bfloat16", generation="none", beta=0.04)
    theirs, ours = _analysis(same), _analysis(same.with_(recipe="lean"))
    weights = theirs.own_peaks["weights"]
    assert weights - theirs.own_peaks["reference_model"] <= 512  # a buffer's block
    # What is around the layers, the layer that computes and the one that is copied.
    layer = 2 * (48 * (2 * 48 + 2 * 16 + 3 * 136) + 2 * 48)
    assert ours.own_peaks["reference_model"] == pytest.approx(weights - 3 * layer, rel=0.02)
    last = [breakdown for breakdown in ours.phases if breakdown.phase == "backward"][-1]
    assert last.categories["reference_model"] == 0


def test_a_named_kind_of_checkpointing_is_that_and_no_more(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``full`` keeps the layers' inputs on the device; ``auto`` sends long sequences' away and tiles their MLPs."""
    from memprof.grpo.techniques import apply as defaults
    from memprof.simulate.evaluate import evaluate

    monkeypatch.setattr(defaults, "OFFLOAD_FROM_BYTES", 0)
    monkeypatch.setattr(defaults, "TILE_TOKENS", 8)
    same = settings_for(dtype="bfloat16", generation="none", lora_r=R, recipe="lean", completion_length=200)
    pinned, tiles = {}, {}
    for kind in ("full", "auto"):
        outcome = evaluate(same.with_(gradient_checkpointing=kind), None)
        pinned[kind] = outcome.raw["memprof"]["host"]["pinned_bytes"]
        stacks = (frame["name"] for event in outcome.raw["device_traces"][0] for frame in event["frames"])
        tiles[kind] = "_backward_tile" in stacks
    assert {kind for kind, held in pinned.items() if held} == {"auto"}
    assert {kind for kind, tiled in tiles.items() if tiled} == {"auto"}


@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.heavy)])
def test_generation_holds_what_the_card_has_room_for(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """The trainer's own rule, asked with what is free on the simulated card: a pool, or passes; without a card all."""
    from transformers import AutoConfig

    from memprof.config.gpus import Gpu, workspace_bytes
    from memprof.grpo.generation import cache_bytes, decode_bytes
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.trainer import lean as lean_patches

    settings = settings_for(
        dtype="bfloat16", lora_r=R, recipe="lean", prompt_length=8, completion_length=240, num_generations=8,
        per_device_train_batch_size=8, cache_implementation=cache,
    )  # fmt: skip
    free: list[int] = []
    asked = lean_patches._free_bytes
    monkeypatch.setattr(lean_patches, "_free_bytes", lambda session: free.append(asked(session)) or free[-1])
    whole = simulate_settings(settings, stacks=False)
    assert set(free) == {lean_patches._UNKNOWN}
    assert not any(note.startswith("generation") for note in whole["memprof"]["notes"])
    config = AutoConfig.from_pretrained(settings.model)
    each = decode_bytes(config, settings.sequence_length, 2)
    card = Gpu("a card", 0, (8, 0), CONTEXT)
    held = 2 * PARAMETERS + ROPE + 12 * LORA + 2 * workspace_bytes(card)  # with AdamW's moments
    card = replace(card, total_bytes=held + int(3.5 * each / 0.85) + CONTEXT)
    free.clear()
    some = simulate_settings(settings, gpu=card, stacks=False)
    assert len(free) >= 2
    assert free[0] - free[-1] >= 8 * LORA  # in the first step there are none yet
    assert free[-1] <= card.available_bytes - held  # what blocks and workspaces round up is not free
    (note,) = (note for note in some["memprof"]["notes"] if note.startswith("generation"))
    if cache == "static":
        size = int(0.85 * free[-1]) // each
        assert size in (2, 3)  # 3.5, less what blocks round up
        assert note == f"generation_batch: {size} of 8 sequences generate together, by the GPU's free memory"
    else:
        words, _, rest = note.partition(" over a pool of ")
        assert words == "generation: sequences generate in a rolling batch"
        pool = cache_bytes(config, int(rest.split()[0]), 2)
        assert 0.1 * free[-1] < pool < 0.85 * free[-1]


def test_repeated_rounds_are_those_that_would_be_executed(
    settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles and chunks, all executed and a few of each: the same events, sizes, stacks, tags and segments."""
    from memprof.grpo.loss import chunked_loss
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.shortcuts import rounds as repeats
    from memprof.simulate.trainer import lean as lean_patches

    chunked = chunked_loss.chunk_size
    monkeypatch.setattr(chunked_loss, "chunk_size", lambda tokens, vocabulary, _: chunked(tokens, vocabulary, 250_000))
    settings = settings_for(
        dtype="bfloat16", generation="none", lora_r=R, recipe="lean", completion_length=200, tiled_mlp=50, optim="none",
        max_tokens_per_piece=1,
    )
    repeated: list[Any] = []
    repeat = repeats._Pattern.repeat
    monkeypatch.setattr(repeats._Pattern, "repeat", lambda self: (repeated.append(self), repeat(self)))
    found, counts = [], []
    for rounds in (lean_patches._rounds_repeated, lambda session: []):
        monkeypatch.setattr(lean_patches, "_rounds_repeated", rounds)
        found.append(simulate_settings(settings))
        del found[-1]["memprof"]["created"]
        counts.append(len(set(map(id, repeated))))
        repeated.clear()
    assert counts[0] > 4 * (LAYERS + 1)  # in each of two pieces and steps
    assert counts[1] == 0
    for name in ("segments", "memprof"):
        assert found[0][name] == found[1][name]
    assert _in_order(found[0]) == _in_order(found[1])


def _in_order(raw: dict[str, Any]) -> list[Any]:
    """The trace without addresses; what is let go of together (a step's gradients) has no order."""
    found: list[Any] = []
    for frees, events in itertools.groupby(raw["device_traces"][0], lambda event: event["action"].startswith("free")):
        rows = [
            (e["action"], e["size"], *(() if frees else (e["time_us"], e["user_metadata"], e["frames"])))
            for e in events
        ]
        found += sorted(rows) if frees else rows
    return found


# -- the ladder ------------------------------------------------------------------------------------------------------


def _base(**changes: Any) -> Settings:
    values = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "recipe": "lean", "lora_r": 16, "dtype": "bfloat16"}
    return Settings(**{**values, "prompt_length": 512, "completion_length": 4096, **changes})


@pytest.mark.parametrize("length", [128, 1500, 20_000])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "HuggingFaceTB/SmolLM2-135M"])
def test_rungs_cost_more_and_more(model: str, length: int) -> None:
    base = _base(model=model, prompt_length=length // 2, completion_length=length // 2)
    costs = [cost_of(settings, find_config(model)) for settings in ladder(base)]
    assert len(costs) >= 6
    assert [c.recomputed_flops for c in costs] == sorted(c.recomputed_flops for c in costs)
    for faster, slower in itertools.pairwise(costs):
        assert (faster.recomputed_flops, faster.host_bytes) <= (slower.recomputed_flops, slower.host_bytes)
        if (faster.recomputed_flops, faster.host_bytes) == (slower.recomputed_flops, slower.host_bytes):
            assert (faster.pieces, faster.tiles) < (slower.pieces, slower.tiles)


def test_recomputed_flops_are_a_forwards() -> None:
    """``2 * weights`` a token for the linear layers, and half of ``4 * heads * head_dim * length`` for attention."""
    base = _base(gradient_checkpointing="full")
    config = find_config(base.model)
    h, f, n = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv = config["num_key_value_heads"] * h // config["num_attention_heads"]
    weights = n * (2 * h * h + 2 * h * kv + 3 * h * f)
    length = base.sequence_length
    assert cost_of(base, config).recomputed_flops == 8 * length * (2 * weights + 2 * n * h * length)
    selective = cost_of(base.with_(gradient_checkpointing="selective"), config)
    assert selective.recomputed_flops == 8 * length * 2 * weights


def test_what_is_fixed_stays() -> None:
    base = _base(gradient_checkpointing="full", tiled_mlp=777)
    rungs = ladder(base, ["gradient_checkpointing", "tiled_mlp"])
    assert {(s.checkpointing, s.tiled_mlp) for s in rungs} == {("full", 777)}
    assert ladder(base, CHOSEN) == [base]
    assert not any(s.checkpointing == "selective" for s in ladder(_base(attn="math")))
    assert not any(s.checkpointing == "offloaded" for s in ladder(_base(device="cpu")))


class _Known:
    """A run whose memory is a formula of its settings: what a rung keeps, and the cache of what generates together."""

    def __init__(self, budget: int, left_over: int = 0) -> None:
        self.budget, self.left_over = budget, left_over
        self.asked: list[Settings] = []

    def __call__(self, wanted: list[Settings]) -> list[SimulatedRow]:
        self.asked += wanted
        return [self.row(settings) for settings in wanted]

    def row(self, settings: Settings) -> SimulatedRow:
        kept = {"none": 40, "selective": 12, "full": 8, "offloaded": 3}[settings.checkpointing]
        training = kept * GIB - (GIB if settings.tiled_mlp else 0) + (settings.max_tokens_per_piece or 2048) * 10_000
        phases = {"backward": 5 * GIB + training, "generate": 5 * GIB + 3 * GIB * (settings.generation_batch or 8)}
        room = int(self.budget / (1 + MARGIN)) - CONTEXT
        reserved = {name: held + self.left_over * (name == "generate") for name, held in phases.items()}
        need = max(reserved.values()) + CONTEXT
        return simulated_row(
            peak_bytes=max(phases.values()),
            peak_phase=max(phases, key=lambda name: phases[name]),
            device_peak_bytes=need,
            fits=max(reserved.values()) <= room,
            phases=phases,
            categories={"weights": 5 * GIB, "activations": max(phases.values()) - 5 * GIB},
            verdict={
                "limit_bytes": room + CONTEXT,
                "non_torch_bytes": CONTEXT,
                "phases": [
                    {"phase": n, "allocated_bytes": phases[n], "reserved_bytes": reserved[n],
                     "needed_bytes": reserved[n] + CONTEXT, "fits": reserved[n] <= room} for n in phases
                ],
            },
        )  # fmt: skip


@pytest.mark.parametrize("left_over", [0, 2 * GIB])
@pytest.mark.parametrize("gib", [9, 10, 12, 15, 16, 20, 24, 31, 40, 48, 80])
def test_the_fastest_that_fits_is_chosen(gib: int, left_over: int) -> None:
    """Against trying every pair."""
    base = _base()
    known = _Known(gib * GIB, left_over)
    every = {
        (place, batch): known.row(settings.with_(generation_batch=batch)).fits
        for place, settings in enumerate(ladder(base))
        for batch in (8, 4, 2, 1)
    }
    fitting = [pair for pair, fits in every.items() if fits]
    if not fitting:
        with pytest.raises(DoesNotFit, match=r"the leanest settings .* need \d"):
            choose(base, gib * GIB, known)
        return
    choice = choose(base, gib * GIB, known)
    assert choice.settings in known.asked
    assert choice.row.fits
    assert choice.settings.generation_batch == max(batch for _, batch in fitting)
    best = ladder(base)[min(place for place, _ in fitting)]
    assert choice.settings.with_(generation_batch=None) == best
    assert len(known.asked) <= 8 < len(every)
    assert [s.with_(generation_batch=None) for s in choice.slower] == ladder(base)[ladder(base).index(best) + 1 :]


@pytest.mark.parametrize("together", [2, 3, 8])
@pytest.mark.parametrize("gib", [9, 12, 20, 31, 80])
def test_simulations_side_by_side_choose_the_same_in_fewer_rounds(gib: int, together: int) -> None:
    base, rounds = _base(), []
    one, several = _Known(gib * GIB), _Known(gib * GIB)

    def counted(wanted: list[Settings]) -> list[dict[str, Any]]:
        rounds.append(len(wanted))
        return several(wanted)

    try:
        alone = choose(base, gib * GIB, one)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):
            choose(base, gib * GIB, counted, together=together)
    else:
        found = choose(base, gib * GIB, counted, together=together)
        assert (found.settings, found.row) == (alone.settings, alone.row)
    assert len(rounds) <= len(one.asked)
    assert max(rounds) <= together
    if together == 8:
        assert len(rounds) <= 3


def test_what_cannot_fit_by_arithmetic_is_not_simulated() -> None:
    """8B at 20,480 tokens on 24 GB: no rung that keeps more than layer inputs, and no more than 2 caches of 2.5 GiB."""
    headline = _base(model="meta-llama/Llama-3.1-8B-Instruct", completion_length=20480 - 512)
    told: list[Tried] = []
    known = _Known(24 * GIB, left_over=25 * GIB // 2)
    choose(headline, 24 * GIB, known, tell=told.append)
    assert {s.checkpointing for s in known.asked} <= {"full", "offloaded"}
    assert max(s.generation_batch or 8 for s in known.asked) == 2
    assert [t.settings for t in told] == known.asked
    assert [t.done for t in told] == list(range(1, len(told) + 1))
    assert {t.most for t in told} == {6}
    assert 3 <= len(told) <= 6
    assert [t.fits for t in told] == [known.row(t.settings).fits for t in told]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gradient_checkpointing": "none"}, marks=pytest.mark.heavy),
        {"gradient_checkpointing": "none", "tiled_mlp": 64, "mixed_precision": "no"},
        pytest.param({"gradient_checkpointing": "selective", "lora_r": R}, marks=pytest.mark.heavy),
        {"gradient_checkpointing": "full", "lora_r": R, "dtype": "bfloat16", "generation_batch": 2},
    ],
)
def test_arithmetic_promises_no_more_than_is_held(settings_for: Callable[..., Any], changes: dict[str, Any]) -> None:
    """The bound is below the simulated peaks of training and of generation, and not far below where it decides."""
    from memprof.plan.lower_bound import least_bytes
    from memprof.plan.simulations import SimulationRequest
    from memprof.simulate.evaluate import run_row

    settings = settings_for(**{"recipe": "lean", "completion_length": 300, "generation_batch": 4, **changes})
    held = {
        phase: {name: n for name, n in categories.items() if name != "workspace"}
        for phase, categories in run_row(
            SimulationRequest(settings=settings.to_dict(), gpu=None)
        ).phase_categories.items()
    }
    training, generation = least_bytes(settings, find_config(settings.model), _piece_tokens(settings))
    assert training <= max(sum(held[phase].values()) for phase in ("forward", "backward"))
    assert generation <= sum(held["generate"].values())
    assert generation > 0.4 * (held["generate"]["weights"] + held["generate"]["kv_cache"])
    if settings.checkpointing == "none" and not settings.tiled_mlp:  # one of two layers, MLP's factors and attention
        assert training - held["forward"]["weights"] > 0.1 * held["forward"]["activations"]


def test_auto_is_no_kind_to_keep() -> None:
    """``gradient_checkpointing=True`` leaves the kind open, as the trainer's own ``checkpointing="auto"`` does."""
    for kind in (True, "auto"):
        choice = choose(_base(gradient_checkpointing=kind), 16 * GIB, _Known(16 * GIB), ["gradient_checkpointing"])
        assert choice.settings.checkpointing == "full"
    kept = choose(_base(gradient_checkpointing="offloaded"), 80 * GIB, _Known(80 * GIB), ["gradient_checkpointing"])
    assert kept.settings.checkpointing == "offloaded"


def test_the_choice_in_words_adds_up() -> None:
    choice = choose(_base(), 24 * GIB, _Known(24 * GIB))
    head, *_, last = sentences(choice).splitlines()
    assert head == "Memory budget 24.00 GiB: checkpointing=selective, generation_batch=4"
    assert last.split() == ["The", "rest", "0.00", "GiB"]
    sizes = [float(line.split()[-2]) for line in sentences(choice).splitlines() if line.startswith("  ")]
    assert sum(sizes) == pytest.approx(choice.row.peak_bytes / GIB, abs=0.02)


def test_only_the_lean_recipe_is_chosen_for() -> None:
    with pytest.raises(UsageError, match="add --recipe lean"):
        choose(_base(recipe="trl"), GIB, _Known(GIB))


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_chooses_and_simulates(tiny: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the chosen settings fixed but one, so that two simulations do."""
    from click.testing import CliRunner

    from memprof.cli import main

    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path))
    run = ["simulate", "--model", tiny, "--num-generations", "2", "--per-device-train-batch-size", "2",
           "--prompt-length", "9", "--completion-length", "12", "--generation", "none"]  # fmt: skip
    lean = [*run, "--recipe", "lean", "--max-tokens-per-piece", "21", "--tiled-mlp", "64"]
    done = CliRunner().invoke(main, [*lean, "--gradient-checkpointing", "full", "--memory-budget", "2GB"])
    assert done.exit_code == 0, done.output
    assert "Memory budget 1.86 GiB: checkpointing=full, max_tokens_per_piece=21, tiled_mlp=64" in done.stderr
    assert "Fits: needs" in done.stderr
    for arguments, words in (
        ([*run, "--memory-budget", "2GB"], "add --recipe lean"),
        ([*lean, "--memory-budget", "auto"], "requires --gpu"),
        ([*lean, "--memory-budget", "2GB", "--device", "cpu"], "drop --device cpu"),
        ([*lean, "--memory-budget", "much"], "give its memory, such as 24GB"),
    ):
        wrong = CliRunner().invoke(main, arguments)
        assert wrong.exit_code == 2
        assert words in wrong.stderr
