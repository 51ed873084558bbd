"""The lean trainer's own step, simulated; and the ladder of its settings, searched for a budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from memprof.errors import DoesNotFit, UsageError
from memprof.simulate.catalogue import find_config
from memprof.simulate.fit import MARGIN
from memprof.simulate.ladder import CHOSEN, choose, cost_of, ladder, sentences
from memprof.simulate.settings import Settings
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
    assert _requested(found, "optimizer_state") == 8 * LORA + 4 * 14 * LAYERS
    tokens = settings.sequence_length - 1
    # Two of the four sequences at a time; the last layer's values are there twice while they grow.
    assert _requested(found, "kv_cache") == 2 * KV * 2 * (2 * LAYERS * tokens + (tokens - 1))


def test_pieces_hold_less_than_trls_micro_batch(settings_for: Callable[..., Any]) -> None:
    same = settings_for(
        dtype="bfloat16", generation="none", lora_r=R, gradient_checkpointing=False, prompt_length=30,
        completion_length=200,
    )  # fmt: skip
    theirs, ours = _analysis(same), _analysis(same.with_(recipe="lean", max_tokens_per_piece=230))
    assert ours.peak.allocated_bytes < theirs.peak.allocated_bytes
    held = [sum(found.peak.categories[name] for name in ("activations", "loss_logits")) for found in (theirs, ours)]
    assert held[1] < 0.25 * held[0]


@pytest.mark.parametrize(
    "given", [{"max_tokens_per_piece": 9}, {"tiled_mlp": 9}, {"generation_batch": 1}, {"prefix_sharing": True}]
)
def test_lean_settings_are_refused_elsewhere(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="add --recipe lean"):
        Settings("m", **given)


def test_a_reference_stays_in_host_memory(settings_for: Callable[..., Any]) -> None:
    same = settings_for(dtype="bfloat16", generation="none", beta=0.04)
    theirs, ours = _analysis(same), _analysis(same.with_(recipe="lean"))
    weights = theirs.own_peaks["weights"]
    assert weights - theirs.own_peaks["reference_model"] <= 512  # a buffer's block
    assert 0 < ours.own_peaks["reference_model"] < weights  # a layer, or what is around the layers, at a time
    last = [breakdown for breakdown in ours.phases if breakdown.phase == "backward"][-1]
    assert last.categories["reference_model"] == 0


# -- the ladder ------------------------------------------------------------------------------------------------------


def _base(**changes: Any) -> Settings:
    values = {"model": "Qwen/Qwen2.5-7B-Instruct", "recipe": "lean", "lora_r": 16, "dtype": "bfloat16"}
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

    def __call__(self, wanted: list[Settings]) -> list[dict[str, Any]]:
        self.asked += wanted
        return [self.row(settings) for settings in wanted]

    def row(self, settings: Settings) -> dict[str, Any]:
        kept = {"none": 40, "selective": 12, "full": 8, "offloaded": 3}[settings.checkpointing]
        training = kept * GIB - (GIB if settings.tiled_mlp else 0) + (settings.max_tokens_per_piece or 2048) * 10_000
        phases = {"backward": 5 * GIB + training, "generate": 5 * GIB + 3 * GIB * (settings.generation_batch or 8)}
        room = int(self.budget / (1 + MARGIN)) - CONTEXT
        reserved = {name: held + self.left_over * (name == "generate") for name, held in phases.items()}
        need = max(reserved.values()) + CONTEXT
        return {
            "peak_bytes": max(phases.values()),
            "peak_phase": max(phases, key=lambda name: phases[name]),
            "device_peak_bytes": need,
            "fits": max(reserved.values()) <= room,
            "phases": phases,
            "categories": {"weights": 5 * GIB, "activations": max(phases.values()) - 5 * GIB},
            "verdict": {
                "limit_bytes": room + CONTEXT,
                "non_torch_bytes": CONTEXT,
                "phases": [
                    {"phase": n, "allocated_bytes": phases[n], "fits": reserved[n] <= room} for n in phases
                ],
            },
        }  # fmt: skip


@pytest.mark.parametrize("left_over", [0, 2 * GIB])
@pytest.mark.parametrize("gib", [9, 10, 12, 15, 16, 20, 24, 31, 40, 48, 80])
def test_the_fastest_that_fits_is_chosen(gib: int, left_over: int) -> None:
    """Against trying every pair."""
    base = _base()
    known = _Known(gib * GIB, left_over)
    every = {
        (place, batch): known.row(settings.with_(generation_batch=batch))["fits"]
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
    assert choice.row["fits"]
    assert choice.settings.generation_batch == max(batch for _, batch in fitting)
    best = ladder(base)[min(place for place, _ in fitting)]
    assert choice.settings.with_(generation_batch=None) == best
    assert len(known.asked) <= 8 < len(every)
    assert [s.with_(generation_batch=None) for s in choice.slower] == ladder(base)[ladder(base).index(best) + 1 :]


def test_the_choice_in_words_adds_up() -> None:
    choice = choose(_base(), 24 * GIB, _Known(24 * GIB))
    head, *_, last = sentences(choice).splitlines()
    assert head == "Memory budget 24.00 GiB: checkpointing=selective, generation_batch=4"
    assert last.split() == ["The", "rest", "0.00", "GiB"]
    sizes = [float(line.split()[-2]) for line in sentences(choice).splitlines() if line.startswith("  ")]
    assert sum(sizes) == pytest.approx(choice.row["peak_bytes"] / GIB, abs=0.02)


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
        ([*lean, "--memory-budget", "auto"], "say which one with --gpu"),
        ([*lean, "--memory-budget", "2GB", "--device", "cpu"], "drop --device cpu"),
        ([*lean, "--memory-budget", "much"], "give a size such as 24GB"),
    ):
        wrong = CliRunner().invoke(main, arguments)
        assert wrong.exit_code == 2
        assert words in wrong.stderr
