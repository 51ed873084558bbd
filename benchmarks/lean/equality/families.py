"""Compare one step of the lean trainer with TRL's over every causal family that a tiny configuration can build.

    python -m benchmarks.lean families [--only NAME]... [--json FILE]

Each family gets a random model of two layers and two micro-batches of unequal rows, padded left and right: one of at
most 9 + 13 tokens a row, one of 27 + 34. A family is ``equal`` (gradient and loss to 1e-4), takes ``TRL's step`` and
says why, is ``refused``, or ``differs``; ``draws`` is a model that draws random numbers in training (phimoe's router),
so that any two orders of rows differ; ``not built`` is a configuration that needs more than sizes, ``TRL fails`` one
that TRL's trainer cannot step.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.measure import write_result
from memprof.errors import UsageError

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
    "init_std": 0.2, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3, "n_embd": 32, "d_model": 32,
    "n_layer": 2, "n_layers": 2, "n_head": 4, "n_heads": 4, "num_layers": 2, "num_heads": 4, "ffn_dim": 48,
    "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "n_positions": 256, "max_seq_len": 256, "n_inner": 48,
    "word_embed_proj_dim": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "state_size": 4, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "dim_model": 32, "dim_ff": 48, "dim_head": 8, "prompt_length": 4, "embedding_size": 32, "attention_hidden_size": 32,
    "router_aux_loss_coef": 0.0, "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
_MLA = {"head_dim": 4, "num_key_value_heads": 4}
#: What families need beside, where one size does not go with another.
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), _MLA),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa"), _MLA),
    "codegen": {"rotary_dim": 4},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "gptj": {"rotary_dim": 4},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "xlstm": {"v_head_dim": None},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"], "attention_head_dim": 8,
               "attention_hidden_size": 64, "n_mamba_heads": 4, "mamba_headdim": 16},
}  # fmt: skip
LENGTHS = ((9, 13), (27, 34))
MOST_PARAMETERS = 20_000_000
_SAME = 1e-4


class Found(NamedTuple):
    """What became of a family: ``verdict``, the distance of gradients over their norm, and a sentence."""

    verdict: str
    apart: float | None = None
    said: str = ""


def names() -> list[str]:
    """Return transformers' causal families."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(family: str, **changes: Any) -> Any:
    """Build a random model of the family, small in every size that its configuration has by a known name."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[family]
    has = kind()
    drop = {name: 0.0 for name, value in vars(has).items() if "drop" in name and isinstance(value, float)}
    sizes = {**SIZES, **BESIDE.get(family, {}), **changes}
    config = kind(**{k: v for k, v in sizes.items() if hasattr(has, k) and v is not None}, **drop)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def compared(family: str, folder: Path, **changes: Any) -> Found:
    """Take one step of each length with both trainers."""
    from tests.grpo.trainers import batch, build, loss_and_gradients, with_policies

    try:
        model = tiny(family, **changes)
    except Exception as error:
        return Found("not built", said=_short(error))
    apart, said = 0.0, ""
    for prompt, completion in LENGTHS:
        try:
            theirs = build("trl", model, folder)
            inputs = with_policies(theirs, batch(prompt=prompt, completion=completion, off_policy=False), beta=0.0)
            loss, meant, _ = loss_and_gradients(theirs, inputs)
        except Exception as error:
            return Found("TRL fails", said=_short(error))
        if not all(bool(gradient.isfinite().all()) for gradient in meant.values()):
            return Found("TRL fails", said="its gradient is not finite")
        try:
            ours = build("lean", model, folder, max_tokens_per_piece=60)
            lean_loss, found, _ = loss_and_gradients(ours, inputs)
        except UsageError as error:
            return Found("refused", said=_short(error))
        except Exception as error:
            return Found("differs", said=_short(error))
        apart = max(apart, _apart(found, meant), abs(lean_loss - loss) / max(1e-6, abs(loss)))
        said = ours._whole_batch_reason or said
    if not apart <= _SAME:
        return Found("draws" if ours._probe.draws else "differs", apart)
    return Found("TRL's step" if said else "equal", apart, said)


def _apart(found: dict[str, Any], meant: dict[str, Any]) -> float:
    if found.keys() != meant.keys():
        return float("inf")
    rest = sum(float((found[name] - meant[name]).double().square().sum()) for name in meant)
    far = (rest / max(1e-24, sum(float(g.double().square().sum()) for g in meant.values()))) ** 0.5
    return float(far) if math.isfinite(far) else float("inf")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


@click.command()
@click.option("--only", multiple=True, help="A family; several may be given.")
@click.option("--json", "out", type=Path, default=None, help="Where the result is written.")
def main(only: tuple[str, ...], out: Path | None) -> None:
    """Compare one step of both trainers over every causal family."""
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        for family in only or names():
            found[family] = compared(family, Path(folder))
            verdict, apart, said = found[family]
            click.echo(f"{family:28} {verdict:11} {'' if apart is None else f'{apart:.1e}'} {said}")
    click.echo(", ".join(f"{count} {verdict}" for verdict, count in Counter(f.verdict for f in found.values()).items()))
    if out is not None:
        write_result({family: one._asdict() for family, one in found.items()}, out)
