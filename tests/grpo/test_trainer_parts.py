"""The lean trainer's parts against closed forms: rows, pieces, the KV cache, rounding, weights, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.config.model_shape import ModelShape
from memprof.config.piece_size import LEAST_BYTES, piece_tokens
from memprof.errors import UsageError
from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer
from memprof.grpo.generation import cache_bytes
from memprof.grpo.reference import reference_place
from memprof.grpo.rows import Row, row_inputs, rows_of
from memprof.grpo.step.pieces import pieces_of, plan
from memprof.grpo.support import check_bfloat16_of
from memprof.grpo.techniques.rounding import StochasticAdamW, round_to_bf16
from tests.grpo.tiny_models import MLA
from tests.grpo.trainers import batch, build, length_reward, saved_llama, tiny_llama
from tests.test_imports import HEAVY, loaded_after


def test_importing_the_package_is_cheap() -> None:
    assert loaded_after("import memprof.grpo; assert 'LeanGRPOTrainer' in dir(memprof.grpo)").isdisjoint(HEAVY)


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_pieces_hold_every_row_once_and_keep_to_the_budget(lengths: list[tuple[int, int]], budget: int) -> None:
    rows = [Row(i, 0, prompt, completion) for i, (prompt, completion) in enumerate(lengths)]
    pieces = pieces_of(rows, budget)
    assert sorted(row.index for piece in pieces for row in piece) == list(range(len(rows)))
    for piece in pieces:
        assert len(piece) == 1 or len(piece) * max(row.length for row in piece) <= budget
    longest = [max(row.length for row in piece) for piece in pieces]
    assert longest == sorted(longest, reverse=True)


def test_rows_are_what_the_masks_say() -> None:
    inputs = batch(6)
    rows = rows_of(inputs)
    assert rows is not None
    for row in rows:
        assert row.prompt == int(inputs["prompt_mask"][row.index].sum())
        assert row.completion == int(inputs["completion_mask"][row.index].sum())
        assert row.offset == 9 - row.prompt


def test_a_pieces_inputs_are_the_rows_without_padding() -> None:
    inputs = batch(6)
    rows = rows_of(inputs) or []
    made = row_inputs(inputs, rows, 1)
    width = max(row.length for row in rows)
    assert made["input_ids"].shape == (6, width)
    for row in rows:
        whole = torch.cat([inputs["prompt_ids"][row.index], inputs["completion_ids"][row.index]])
        assert torch.equal(made["input_ids"][row.index, : row.length], whole[row.offset : row.offset + row.length])
        assert made["position_ids"][row.index, 0] == row.offset
    alone = [row for row in rows if row.offset == 0]
    assert "position_ids" not in row_inputs(inputs, alone, 1)


@pytest.mark.parametrize("name", ["prompt_mask", "completion_mask"])
def test_holes_and_empty_prompts_are_seen(name: str) -> None:
    inputs = batch(4)
    inputs[name][:, 5 if name == "prompt_mask" else 1] = 0
    inputs[name][0, 5 if name == "prompt_mask" else 1] = 0
    assert rows_of(inputs) is None
    inputs = batch(4)
    inputs["prompt_mask"][2] = 0
    assert rows_of(inputs) is None


def test_fake_tensors_count_as_full() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        rows = rows_of({"prompt_mask": torch.ones(3, 5), "completion_mask": torch.ones(3, 7)})
    assert rows == [Row(i, 0, 5, 7) for i in range(3)]


def test_cache_bytes_is_what_generation_holds() -> None:
    model = tiny_llama().eval()
    ids = torch.randint(4, 60, (1, 30))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes(model.config, 30, 4) == held


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", MLA),
        ("gemma3_text", {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}),
        ("lfm2", {"num_hidden_layers": 4, "full_attn_idxs": [2]}),
        ("qwen3_next", {
            "num_hidden_layers": 8, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        }),
    ],
)  # fmt: skip
def test_layers_are_counted_by_what_they_keep(family: str, changes: dict[str, Any]) -> None:
    """Latent attention, windows, convolutions and linear attention: against the cache of a forward."""
    from memprof.config.model_shape import ModelShape
    from tests.grpo import tiny_models

    model = tiny_models.build(family, **changes).eval()
    with torch.no_grad():
        cache = model(torch.randint(4, 60, (1, 30)), use_cache=True).past_key_values
    held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in held)
    assert cache_bytes(model.config, 30, 4) == kept + sum(_bytes(state) for state in states)
    assert ModelShape.of(model.config).kv_cache_bytes(30, 4) == kept
    assert ModelShape.of(model.config).caching_layers == len(held)
    if family == "qwen3_next":  # its config.json says how often, not which
        stated = {k: v for k, v in model.config.to_dict().items() if k != "layer_types"} | {
            "full_attention_interval": 4
        }
        assert ModelShape.of(stated).kv_cache_bytes(30, 4) == kept


def _bytes(state: Any) -> int:
    """Count a state's bytes: a tensor's, or those of a table of them."""
    if isinstance(state, dict):
        return sum(_bytes(inner) for inner in state.values())
    return 0 if state is None else int(state.nbytes)


def test_cache_bytes_of_a_published_case() -> None:
    """Llama-3.1-8B, 20,480 tokens, bf16: 2.5 GiB a sequence."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    assert cache_bytes(config, 20480, 2) == 2.5 * 2**30


def test_sequences_together_is_what_the_free_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from memprof.grpo import device, generation

    model = tiny_llama()
    step: Any = SimpleNamespace(
        settings=SimpleNamespace(generation_batch=None, cache_implementation="dynamic"),
        accelerator=SimpleNamespace(device=torch.device("cuda")),
        policy=model,
        completion_length=20,
        tile=None,
        base_model=lambda: model,
    )
    prompts = [[5] * 10] * 8
    decode = generation.decode_bytes(model.config, 30, 4)
    prompt, _ = generation.prompt_bytes(model.config, 10, 4, adapters=False, tile=None)
    each = max(decode, prompt)
    assert min(decode - cache_bytes(model.config, 30, 4), prompt - cache_bytes(model.config, 10, 4)) > 0

    def together() -> int:
        return generation._evenly(len(prompts), generation._most_together(step, prompts))

    for free, expected in ((100 * each, 8), (9 * each, 4), (4.8 * each, 4), (0.1 * each, 1)):
        monkeypatch.setattr(device, "free_bytes", lambda device, free=free: free)
        assert together() == expected
    for asked, expected in ((3, 3), (7, 4), (8, 8)):
        step.settings.generation_batch = asked
        assert together() == expected


def test_the_size_of_passes_is_kept_until_it_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from memprof.grpo import generation
    from memprof.grpo.once_log import OnceLog

    log = OnceLog()
    step: Any = SimpleNamespace(
        settings=SimpleNamespace(generation_batch=None), ranks=SimpleNamespace(least=lambda n: n), log=log
    )
    size, room = generation.PassSize(), [0]
    monkeypatch.setattr(generation, "_most_together", lambda step, prompts: min(room[0], len(prompts)))
    found = []
    # Room for so many, and prompts: 7 of 8 is kept, 3 is less than that.
    for room[0], count in ((9, 8), (7, 8), (99, 8), (99, 6), (99, 2), (3, 8), (99, 8), (99, 3)):
        found.append(size.of(step, [[1]] * count))
    assert found == [8, 4, 4, 6, 2, 3, 3, 3]
    assert "8 sequences generate in 2 passes of at most 4: about 2 times the decode steps of one pass over all" in (
        log.said
    )
    assert any(line.startswith("the free memory fits 3 sequences") for line in log.said)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("tile", [None, 128])
def test_prompts_hold_what_is_planned_for(adapters: bool, tile: int | None) -> None:
    """On fake tensors and CUDA's kernels, of which each further sequence holds as much as the one before."""
    from peft import LoraConfig, get_peft_model

    from memprof.grpo.generation import prompt_bytes
    from memprof.grpo.techniques.tiled_mlp import apply_tiled_mlp
    from memprof.simulate.run import simulate
    from memprof.simulate.trainer.models import build_model

    config = tiny_llama(hidden_size=64, intermediate_size=224, num_hidden_layers=3).config
    held: dict[int, int] = {}

    def prefill(session: Any) -> None:
        model = build_model(config, "bfloat16", attention="sdpa")
        if adapters:
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        if tile:
            apply_tiled_mlp(model, tile)
        for count in (1, 1, 2, 4):  # the first takes cuBLAS's workspace
            before = session.fake_recorder.allocator.allocated
            session.fake_recorder.open_window()
            with torch.no_grad():
                model.eval()(torch.zeros(count, 4096, dtype=torch.long), use_cache=True, logits_to_keep=1)
            held[count] = session.fake_recorder.close_window().allocated_peak - before

    simulate(prefill)
    each, shared = prompt_bytes(config, 4096, 2, adapters=adapters, tile=tile)
    assert 0.6 * each < held[2] - held[1] <= each
    assert held[4] <= 4 * each + shared + 2**21


def test_tiles_come_with_automatic_checkpointing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from memprof.grpo.techniques.apply import TILE_TOKENS, tile_of

    def tile(kind: str, tiled: int | None = None, on: bool = True, length: int = TILE_TOKENS + 1) -> int | None:
        given = {"tiled_mlp": tiled, "checkpointing": kind, "gradient_checkpointing": on}
        return tile_of(SimpleNamespace(**given, max_completion_length=length), model)

    model = tiny_llama()
    assert tile("auto") == TILE_TOKENS
    assert tile("auto", on=False) is None
    assert tile("auto", length=TILE_TOKENS) is None
    assert [tile(kind) for kind in ("none", "mlp", "selective", "full", "offloaded")] == [None] * 5
    assert [tile("full", 64), tile("auto", 64), tile("auto", 0)] == [64, 64, None]
    model.model.layers[1].mlp.router = torch.nn.Linear(4, 4)
    assert tile("auto") is None


@pytest.mark.parametrize("family", ["opt", "bloom", "mpt", "mamba", "lfm2"])
def test_long_completions_of_layers_that_are_not_known_train_without_tiles(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no switch set: the network has no known name, takes a residual, or some layers have no attention."""
    from types import SimpleNamespace

    from memprof.grpo.techniques import apply
    from tests.grpo.tiny_models import without_weights

    model = without_weights(family, **({"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}))
    args = SimpleNamespace(
        tiled_mlp=None, checkpointing="auto", gradient_checkpointing=True, max_completion_length=2 * apply.TILE_TOKENS
    )
    assert apply.tile_of(args, model) is None
    monkeypatch.setattr(apply, "OFFLOAD_FROM_BYTES", 1)
    monkeypatch.setattr(apply.machine, "device_kind", lambda device: "cuda")
    known = family in ("opt", "bloom", "mpt")
    assert apply.checkpointing_of(args, model, torch.device("cpu")) == ("offloaded" if known else "auto")


def test_rounding_is_right_on_average() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-10, -(1.0 + 3 * 2**-9), 3e-39, 0.0])
    source = torch.Generator().manual_seed(0)
    rounded = torch.stack([round_to_bf16(values, source).double() for _ in range(20000)])
    spread = rounded.std(0) / math.sqrt(len(rounded))
    assert torch.all((rounded.mean(0) - values.double()).abs() <= 4 * spread + 1e-45)
    exact = torch.tensor([1.5, -0.25, math.inf, -math.inf, 0.0])
    assert torch.equal(round_to_bf16(exact).float(), exact)
    assert torch.isnan(round_to_bf16(torch.tensor([math.nan])).float()).all()


def test_small_updates_are_not_lost() -> None:
    """1000 steps of 1e-5 on weights of 1: plain bf16 stays where it was, fp32 goes to 0.99."""

    def run(kind: Any, dtype: torch.dtype) -> float:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(4096, dtype=dtype))
        optimizer = kind([weight], lr=1e-5, weight_decay=0.0)
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return float(weight.double().mean())

    assert run(torch.optim.AdamW, torch.bfloat16) == 1.0
    assert run(torch.optim.AdamW, torch.float32) == pytest.approx(0.99, abs=1e-4)
    assert run(StochasticAdamW, torch.bfloat16) == pytest.approx(0.99, abs=5e-4)


def test_in_fp32_it_is_torchs_adamw() -> None:
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2)]
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = [
        torch.optim.AdamW([weights[0]], **settings),  # type: ignore[arg-type]
        StochasticAdamW([weights[1]], **settings),  # type: ignore[arg-type]
    ]
    for step in range(20):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.sin(torch.arange(50.0) + step)
            optimizer.step()
    assert torch.allclose(*weights, atol=1e-6)
    # The state is torch's too, so a checkpoint of either resumes the other.
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    assert optimizers[0].state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.trl
@pytest.mark.parametrize(
    ("optim", "kind"), [("adamw_torch", "StochasticAdamW"), ("adamw_torch_fused", "StochasticAdamW"), ("sgd", "SGD")]
)
def test_bf16_training_rounds_at_random(
    optim: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build("lean", tiny_llama(torch.bfloat16), tmp_path, optim=optim, max_steps=1)
    with caplog.at_level("INFO"):
        optimizer = trainer.create_optimizer()
    assert type(optimizer).__name__ == kind
    assert "stochastic rounding" in caplog.text if kind == "StochasticAdamW" else "updates below" in caplog.text
    never = build("lean", tiny_llama(torch.bfloat16), tmp_path, optim="adamw_torch", stochastic_rounding="never")
    assert type(never.create_optimizer()).__name__ == "AdamW"
    assert type(build("lean", tiny_llama(), tmp_path, optim="adamw_torch").create_optimizer()).__name__ == "AdamW"


@pytest.mark.trl
def test_torchaos_8_bit_adam_rounds_at_random_too(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    trainer = build("lean", tiny_llama(torch.bfloat16), tmp_path, optim="adamw_torch_8bit", max_steps=1)
    optimizer = trainer.create_optimizer()
    assert type(optimizer).__name__ == "AdamW8bit"
    assert optimizer.bf16_stochastic_round


@pytest.mark.trl
@pytest.mark.parametrize(
    ("weights", "bf16", "lora", "expected"),
    [
        ("auto", True, True, torch.bfloat16),
        ("auto", False, True, torch.float32),
        ("auto", True, False, torch.float32),
        ("bf16", False, False, torch.bfloat16),
        ("fp32", True, True, torch.float32),
        ("as_given", True, True, torch.float32),
    ],
)
def test_dtype_of_a_model_given_as_a_string(
    weights: str, bf16: bool, lora: bool, expected: torch.dtype, tmp_path: Path
) -> None:
    model = saved_llama(tmp_path / "model")
    trainer = build("lean", model, tmp_path, weights=weights, bf16=bf16, lora=lora)
    assert trainer._step_context().base_model().lm_head.weight.dtype == expected


@pytest.mark.trl
def test_what_is_refused(tmp_path: Path) -> None:
    from trl import RLOOTrainer

    model = tiny_llama()
    for settings_given, words in [
        ({"optim": "lomo"}, "inside the backward"),
        ({"exact_two_pass": "never", "top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"checkpointing": "some"}, "checkpointing is one of"),
        ({"max_tokens_per_piece": 0}, "at least 1"),
        ({"micro_splitting": "no"}, "micro_splitting is True or False: got 'no'"),
        ({"generation_batch": "2"}, "generation_batch is a whole number of at least 1: got '2'"),
        ({"tiled_mlp": 2.5}, "tiled_mlp is a whole number of at least 1, or 0 for off: got 2.5"),
        ({"reference": "adapter", "beta": 0.1}, "needs an adapter"),
        ({"reference": "host", "beta": 0.1, "sync_ref_model": True}, "sync_ref_model"),
        ({"reference": "host", "beta": 0.1, "lora": True}, "full fine-tuning"),
    ]:
        with pytest.raises(UsageError, match=words):
            build("lean", model, tmp_path, **settings_given)

    class Other(LeanGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs)

    class Mixed(LeanGRPOTrainer, RLOOTrainer):  # type: ignore[misc, unused-ignore]
        pass

    with pytest.raises(UsageError, match="cannot be combined with RLOOTrainer"):
        Mixed(model, length_reward, LeanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False))
    with pytest.raises(UsageError, match="overridden _compute_loss"):
        Other(model, length_reward, LeanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, exact_two_pass="never"))


def test_where_the_reference_is_put(tmp_path: Path) -> None:
    def place(adapter: bool, **settings: Any) -> str:
        return reference_place(LeanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **settings), adapter)[0]

    assert place(False, beta=0.0) == "none"
    assert place(True, beta=0.1) == "adapter"
    assert place(False, beta=0.1) == "host"
    assert place(False, beta=0.1, reference="device") == "device"
    assert place(False, beta=0.1, sync_ref_model=True) == "device"


@pytest.mark.parametrize("half", ["bf16", "bfloat16"])
def test_bfloat16_is_refused_where_its_products_into_float32_are_not_computed(half: str, tmp_path: Path) -> None:
    args = LeanGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(UsageError, match=r"compute capability 7\.5.*fp16=True, bf16=False"):
        check_bfloat16_of((7, 5), half, args)
    check_bfloat16_of((8, 0), half, args)
    check_bfloat16_of((7, 5), "fp16", args)
    args.cast_lm_head_to_fp32 = True
    check_bfloat16_of((7, 5), half, args)


def test_short_rows_of_a_small_model_go_together(tmp_path: Path) -> None:
    """By default in pieces of 32 MiB, which `max_tokens_per_piece` overrules; long rows are pieces of their own."""
    counts = {}
    for tokens in (None, 1):
        ours = build("lean", tiny_llama(), tmp_path, max_tokens_per_piece=tokens)
        for length in (13, 600):
            inputs = batch(4, completion=length)
            rows = rows_of(inputs)
            assert rows is not None
            counts[tokens, length] = len(plan(ours._step_context(), inputs, rows))
    assert counts == {(None, 13): 1, (1, 13): 4, (None, 600): 2, (1, 600): 4}
    shape = ModelShape.of(tiny_llama().config)
    token = 4 * (12 * 32 + 4 * 56)  # a layer's tensors, fp32
    assert piece_tokens(shape, 10_000, 4) == min(2048, LEAST_BYTES // token)
    assert piece_tokens(shape, 64 * 1000 * token, 4) == 2048
