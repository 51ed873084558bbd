"""The rolling batch against transformers' ``generate``: the same tokens from a pool of any size."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from memprof.grpo.paged.cache import PooledCache, SlotPool, TokenPlaces  # noqa: E402
from memprof.grpo.paged.rolling import RollingBatch  # noqa: E402
from memprof.grpo.paged.sampling import Sampling  # noqa: E402
from memprof.grpo.paged.schedule import GenerationCounts, PoolSize  # noqa: E402
from memprof.grpo.paged.support import NotPaged, why_not  # noqa: E402
from memprof.grpo.paged.transformers_loop import decode_in_pool  # noqa: E402
from tests.grpo.tiny_models import MLA, build, tokens  # noqa: E402

PROMPT, NEW, ROWS = 9, 24, 8
WHOLE = 4 * PROMPT + ROWS * NEW  # four prompts of two completions each
POOLS = (PROMPT + NEW, 2 * (PROMPT + NEW), WHOLE)


def prompts() -> tuple[Any, Any]:
    """Ids ``[8, 9]`` and mask: each prompt twice, the second pair shorter by four."""
    ids = tokens(ROWS * PROMPT).view(ROWS, PROMPT)
    ids[1::2] = ids[::2]
    mask = torch.ones_like(ids)
    mask[2:4, :4] = 0
    ids[2:4, :4] = 0
    return ids, mask


def generated(
    model: Any, slots: int | None = None, gathered: int = 10**9, **settings: Any
) -> tuple[list[Any], GenerationCounts]:
    """New tokens of each row up to its end, by ``generate`` or, with ``slots``, by the rolling batch."""
    ids, mask = prompts()
    work = GenerationCounts()
    size = None if slots is None else PoolSize(slots, gathered)
    loop = {} if size is None else {"custom_generate": partial(decode_in_pool, size=size, work=work)}
    given = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": 2, "do_sample": False, **settings}
    config = transformers.GenerationConfig(**given)
    with torch.no_grad():
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **loop)[:, PROMPT:]
    return [_ended(row.tolist(), given["eos_token_id"]) for row in found], work


def _ended(row: list[int], stop: Any) -> list[int]:
    stops = stop if isinstance(stop, list) else [stop]
    first = min((i for i, token in enumerate(row) if token in stops), default=len(row))
    return row[: first + 1]


@pytest.mark.parametrize("slots", POOLS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "phi", "deepseek_v3", "mixtral"])
def test_greedy_tokens_are_generates(family: str, slots: int) -> None:
    """Grouped queries, head norms, windows wide enough, one projection, MLA and experts."""
    model = build(family, **(MLA if family == "deepseek_v3" else {})).eval()
    whole, _ = generated(model)
    rolling, work = generated(model, slots)
    assert rolling == whole
    assert len({len(row) for row in whole}) > 1 or work.rows == ROWS * (NEW - 1)
    assert (work.again > 0) == (slots < WHOLE)


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.4}, {"eos_token_id": [2, 17, 31]}, {"suppress_tokens": [2, 5]}, {"max_new_tokens": 1}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_greedy_decoding_are_generates(settings: dict[str, Any]) -> None:
    model = build("llama", seed=3).eval()
    assert generated(model, POOLS[1], **settings)[0] == generated(model, **settings)[0]


def test_more_room_takes_fewer_steps() -> None:
    """Fewer than passes would: two sequences of full length have room, and passes of two take four times the steps."""
    model = build("llama").eval()
    steps = [generated(model, slots, suppress_tokens=[2])[1].steps for slots in POOLS]
    assert steps[2] == NEW - 1
    assert steps[2] < steps[1] < 4 * (NEW - 1)
    assert steps[1] < steps[0] <= 8 * (NEW - 1)


def test_what_is_gathered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = RollingBatch._forward

    def watched(self: Any, ids: Any, positions: Any, mask: Any, read: Any) -> Any:
        if len(read) > 1:
            seen.append(read.numel())
        return forward(self, ids, positions, mask, read)

    monkeypatch.setattr(RollingBatch, "_forward", watched)
    model = build("llama").eval()
    for gathered in (10**9, 100, 1):
        seen.clear()
        assert generated(model, WHOLE, gathered)[0] == generated(model)[0]
        assert max(seen, default=0) <= gathered
    assert not seen  # one at a time


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
    ids=lambda settings: "+".join(settings) or "plain",
)  # fmt: skip
def test_tokens_are_drawn_from_generates_distribution(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every token: the probabilities drawn from are those ``generate`` makes of the same prefix."""
    from memprof.grpo.paged import sampling

    model = build("llama", seed=1).eval()
    used: dict[tuple[int, int], Any] = {}
    chosen: list[tuple[int, int]] = []
    invert, choose = sampling._inverted, Sampling.next_tokens

    def choosing(self: Any, logits: Any, rows: list[int], positions: list[int], ids: Any) -> Any:
        chosen[:] = zip(rows, positions, strict=True)
        return choose(self, logits, rows, positions, ids)

    def inverting(probabilities: Any, draws: Any) -> Any:
        used.update(zip(chosen, probabilities, strict=True))
        return invert(probabilities, draws)

    monkeypatch.setattr(Sampling, "next_tokens", choosing)
    monkeypatch.setattr(sampling, "_inverted", inverting)
    torch.manual_seed(0)
    given = {"do_sample": True, "top_k": 0, **settings}
    found, work = generated(model, POOLS[1], **given)
    assert work.again > 0
    ids, mask = prompts()
    config = transformers.GenerationConfig(
        max_new_tokens=1, pad_token_id=0, eos_token_id=2, output_scores=True, return_dict_in_generate=True, **given
    )
    for row, new in enumerate(found):
        prompt = ids[row][mask[row].bool()].tolist()
        for at in {0, len(new) // 2, len(new) - 1}:
            prefix = torch.tensor([prompt + new[:at]])
            theirs = model.generate(prefix, attention_mask=torch.ones_like(prefix), generation_config=config)
            assert torch.allclose(used[row, at], theirs.scores[0][0].softmax(-1), atol=1e-5), (row, at)
            assert used[row, at][new[at]] > 0


def test_a_seed_draws_the_same_whatever_the_pool() -> None:
    model = build("llama", seed=2).eval()
    found = []
    for seed, slots in ((4, POOLS[0]), (4, POOLS[1]), (4, POOLS[2]), (5, POOLS[2])):
        torch.manual_seed(seed)
        found.append(generated(model, slots, do_sample=True)[0])
    assert found[0] == found[1] == found[2] != found[3]


def test_draws_are_spread_as_the_probabilities_say() -> None:
    from memprof.grpo.paged.sampling import _inverted

    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    count = 800
    draws = torch.arange(count, dtype=torch.float64) / count  # 0 among them
    found = torch.bincount(_inverted(probabilities.expand(count, -1), draws), minlength=7)
    assert found.tolist() == [0, 200, 0, 400, 100, 100, 0]
    almost = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert _inverted(probabilities[None], almost).tolist() == [5]


def test_sequences_share_their_prompts_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts are computed once each, and the pool's bytes are those of its slots."""
    model = build("llama").eval()
    caches: list[Any] = []
    run = RollingBatch.run
    monkeypatch.setattr(RollingBatch, "run", lambda self: (caches.append(self._cache), run(self))[1])
    _, work = generated(model, WHOLE)
    assert work.forwards == 4
    config = model.config
    each = 2 * config.num_key_value_heads * config.head_dim * 4
    for layer in caches[0].layers:
        assert layer.keys.nbytes + layer.values.nbytes == (WHOLE + 1) * each


def test_long_prompts_go_through_the_model_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from memprof.grpo.paged import schedule

    model = build("llama").eval()
    whole, _ = generated(model)
    monkeypatch.setattr(schedule, "CHUNK", 4)
    found, work = generated(model, WHOLE)
    assert found == whole
    assert work.forwards == 3 * 3 + 2


def test_a_pool_hands_out_what_is_free() -> None:
    pool = SlotPool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    with pytest.raises(MemoryError, match="1 slots asked for, 0 are free"):
        pool.take(1)
    pool.give_back(first)
    assert pool.free == 2
    assert sorted(pool.take(2)) == sorted(first)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"min_new_tokens": 3}, "MinNewTokensLengthLogitsProcessor"),
        ({"max_time": 60.0}, "MaxTimeCriteria"),
        ({"num_beams": 2}, "2 beams"),
        ({"cache_implementation": "static"}, "a static cache"),
    ],
)
def test_what_needs_whole_rows_is_left_to_generate(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(NotPaged, match=named):
        generated(build("llama").eval(), WHOLE, **settings)


def test_probabilities_that_are_none_are_refused() -> None:
    """As ``generate`` refuses them: no token follows from them, not even for a GPU to stumble over."""
    model = build("llama").eval()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(RuntimeError, match="contain inf or nan"):
        generated(model, WHOLE, do_sample=True)


def _settings(**given: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(**{"cache_implementation": None, **given})


def test_models_it_does_not_fit_are_named() -> None:
    llama = build("llama")
    assert why_not(llama, _settings(), 4096, together=False) is None
    assert why_not(llama, _settings(), 4096, together=True) == "ranks run their forwards together"
    offloaded = _settings(cache_implementation="offloaded")
    assert why_not(llama, offloaded, 9, together=False) == "cache_implementation is 'offloaded'"
    windows = build("mistral", sliding_window=30)
    assert why_not(windows, _settings(), 30, together=False) is None
    assert why_not(windows, _settings(), 31, together=False) == (
        "layers see a window of 30 tokens, and sequences have up to 31"
    )
    hybrid = build("qwen3_next", num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"])
    assert why_not(hybrid, _settings(), 9, together=False) == "the model has layers of kind linear_attention"


def test_pools_of_layers_alike_are_taken_before_the_first_forward_goes_on() -> None:
    """Each taken where a forward comes to its layer would lie in a segment that the forward has freed."""
    states = torch.ones(1, 2, 1, 4)
    cache = PooledCache(5, 3, alike=3)
    cache.rows = TokenPlaces(write=torch.tensor([0]), read=torch.tensor([[0]]), new=1)
    cache.update(states, states, 0)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(6, 2, 4)] * 3
    wider = torch.ones(1, 3, 1, 4)  # what was counted alike and is not
    keys, values = cache.update(wider, states, 1)
    assert (keys.tolist(), values.tolist()) == (wider.tolist(), states.tolist())
    assert cache.layers[2].keys.shape == (6, 2, 4)


def test_a_models_layers_take_their_pools_together(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = []
    update = PooledCache.update

    def watched(self: PooledCache, *given: Any, **more: Any) -> Any:
        found = update(self, *given, **more)
        layers.append(len(self.layers))
        return found

    monkeypatch.setattr(PooledCache, "update", watched)
    generated(build("llama").eval(), slots=WHOLE)
    assert layers[0] == 2
