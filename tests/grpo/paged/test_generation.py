"""The lean trainer's generation where memory is short: which way it takes, what it holds, logs and keeps."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from memprof.grpo import device as machine  # noqa: E402
from memprof.grpo import generation  # noqa: E402
from memprof.grpo.generation import KEPT, pool_size  # noqa: E402
from memprof.grpo.paged.cache import _PooledLayer  # noqa: E402
from tests.grpo.trainers import build, logged, saved_llama, tiny_llama  # noqa: E402

pytestmark = pytest.mark.trl

PROMPTS = [[4 + i // 4 * 7, 9, 5] for i in range(8)]  # two groups of four


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_llama(tmp_path_factory.mktemp("checkpoint") / "model")


def answers(trainer: Any, prompts: list[list[int]] = PROMPTS) -> Any:
    trainer.model_wrapped = trainer.model
    return trainer._generate_single_turn(prompts, None, {}, 4)[0]


def said(trainer: Any, words: str) -> list[str]:
    return [line for line in trainer._once_log.said if words in line]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("settings", [{"generation_batch": 2}, {"generation": "paged"}], ids=["cap", "asked"])
def test_a_rolling_batch_answers_as_one_pass(settings: dict[str, Any], lora: bool, tmp_path: Path) -> None:
    greedy = {"generation_kwargs": {"do_sample": False}, "lora": lora}
    whole = build("lean", tiny_llama(), tmp_path, **greedy)
    rolling = build("lean", tiny_llama(), tmp_path, **greedy, **settings)
    assert answers(rolling) == answers(whole)
    (line,) = said(rolling, "rolling batch")
    assert line.startswith("sequences generate in a rolling batch over a pool of ")
    assert not said(whole, "rolling batch")
    assert not said(rolling, "passes")


def test_passes_are_there_where_asked_for(tmp_path: Path) -> None:
    trainer = build("lean", tiny_llama(), tmp_path, generation_batch=2, generation="generate")
    answers(trainer)
    assert said(trainer, "8 sequences generate in 4 passes of at most 2")
    assert not said(trainer, "rolling batch over")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "generate would use NoRepeatNGramLogitsProcessor"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
    ],
)
def test_the_log_says_why_passes_are_taken(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    trainer = build("lean", tiny_llama(), tmp_path, generation_batch=4, **settings)
    assert len(answers(trainer)) == 8
    assert said(trainer, f"no rolling batch, so that sequences generate in passes: {why}")
    assert said(trainer, "2 passes of at most 4")


def test_sampled_log_probabilities_are_the_models_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The logits that tokens were chosen by, against a forward pass over the same tokens."""
    from memprof.grpo.paged.sampling import Sampling

    trainer = build("lean", tiny_llama(), tmp_path, generation_batch=2, max_completion_length=24)
    logps: dict[tuple[int, int], float] = {}
    choose = Sampling.next_tokens

    def watched(self: Any, logits: Any, rows: list[int], positions: list[int], ids: Any) -> Any:
        found = choose(self, logits, rows, positions, ids)
        for row, at, scores, token in zip(rows, positions, logits, found.tolist(), strict=True):
            logps[row, at] = float(scores.log_softmax(-1)[token])
        return found

    monkeypatch.setattr(Sampling, "next_tokens", watched)
    torch.manual_seed(1)
    found = answers(trainer)
    assert "computed 0 tokens again" not in said(trainer, "rolling batch")[0]
    for row, (prompt, new) in enumerate(zip(PROMPTS, found, strict=True)):
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        meant = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        ours = torch.tensor([logps[row, at] for at in range(len(new))])
        assert torch.allclose(ours, meant, atol=2e-5)


def test_the_pool_is_given_back_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At once, not when the garbage collector comes by."""
    pools: list[Any] = []
    allocate = _PooledLayer._pool
    monkeypatch.setattr(
        _PooledLayer, "_pool", lambda self, states: (pool := allocate(self, states), pools.append(weakref.ref(pool)))[0]
    )
    trainer = build("lean", tiny_llama(), tmp_path, generation="paged")
    gc.disable()
    try:
        answers(trainer)
        assert pools
        assert not [pool for pool in pools if pool() is not None]
    finally:
        gc.enable()
    assert "generate" not in vars(trainer.model)


def test_the_cache_keeps_to_its_cap(tmp_path: Path) -> None:
    """By tensor trace: keys and values, and what is gathered of a layer, of a quarter of the sequences."""
    from memprof import analyze, record

    model = tiny_llama(num_hidden_layers=8)
    trainer = build("lean", model, tmp_path, generation_batch=2, max_completion_length=40,
                    generation_kwargs={"suppress_tokens": [2]})  # fmt: skip
    path = tmp_path / "traced.pickle"
    with record(str(path), model=trainer.model, device="cpu"):
        found = answers(trainer)
    assert [len(row) for row in found] == [40] * 8
    held = analyze(str(path)).to_dict()["own_peaks"]["kv_cache"]
    config = model.config
    token = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4
    layers = config.num_hidden_layers
    cap = 2 * (3 + 40) * layers * token
    size = pool_size(trainer._step_context(), PROMPTS)
    assert held == (size.slots + 1) * layers * token  # one slot more is the padding's
    assert held + size.gathered * token <= cap + layers * token
    assert held > 0.7 * cap


def _card(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
    monkeypatch.setattr(machine, "device_kind", lambda device: "cuda")
    monkeypatch.setattr(machine, "free_bytes", lambda device: free[0])


def test_a_tight_card_takes_a_pool_and_an_empty_one_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = build("lean", tiny_llama(), tmp_path, max_completion_length=100)
    step = trainer._step_context()
    long = [ids * 20 for ids in PROMPTS]
    free = [1 << 40]
    _card(monkeypatch, free)
    assert pool_size(step, long).slots == 2 * 60 + 8 * 100
    free[0] = 1 << 19
    small = pool_size(step, long)
    assert 160 <= small.slots < 920
    free[0] = 1
    assert pool_size(step, long).slots == 160  # one sequence always has room
    size = generation.ModelShape.of(trainer.model.config).kv_cache_bytes(1, 4)
    assert small.slots * size < 0.85 * (1 << 19)


def test_the_size_is_kept_and_goes_into_checkpoints(
    monkeypatch: pytest.MonkeyPatch, checkpoint: str, tmp_path: Path
) -> None:
    """A resumed run generates as the first did, though its card has become emptier."""
    free = [1 << 17]
    settings: dict[str, Any] = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 60,
        "per_device_train_batch_size": 8, "num_generations": 8,
    }  # fmt: skip
    with monkeypatch.context() as patched:
        _card(patched, free)
        # What is on a card for training does not run here.
        first = build("lean", checkpoint, tmp_path, **settings, checkpointing="none", tiled_mlp=0)
        first.train()
        folder = Path(first.args.output_dir) / "checkpoint-2"
        kept = json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"][KEPT]
        assert kept["pool"][0] < 60 * 8
        free[0] = 1 << 40
        resumed = build("lean", checkpoint, tmp_path / "again", **settings, checkpointing="none", tiled_mlp=0)
        resumed.train(resume_from_checkpoint=str(folder))
        assert resumed.state.stateful_callbacks[KEPT] == kept
    assert logged(resumed)[:4] == logged(first)[:4]


def test_sizes_that_have_no_room_any_more_become_smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = [1 << 18]
    _card(monkeypatch, free)
    trainer = build("lean", tiny_llama(), tmp_path, generation="paged", max_completion_length=60, checkpointing="none")
    kept: dict[str, Any] = {}
    chosen = []
    for free[0] in (1 << 18, 1 << 40, 7 << 15, 1 << 18):
        trainer._generation.run(trainer._step_context(), PROMPTS, lambda ids: ([[1]] * len(ids), None), kept)
        chosen.append(kept[KEPT]["pool"][0])
    assert chosen[0] == chosen[1] > chosen[2] == chosen[3]
    assert said(trainer, f"the free memory fits {chosen[2]} tokens in generation now, {chosen[0]}")
