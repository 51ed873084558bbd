"""Make local stand-ins for the models and datasets that TRL's tests load from the Hugging Face Hub.

The models are random, of the same classes, and small in every size. They lie in a folder that has the layout of the
Hub's cache, so that ``from_pretrained`` finds them offline under their own names. Tests that need a real vocabulary, an
image processor or code from the Hub fail with every trainer, and are reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lean.equality.families import BESIDE, MOST_PARAMETERS, SIZES

OWNER = "trl-internal-testing"
_REVISION = "0" * 40
#: By the start of a model's name, TRL's chat template for it; the others have ChatML's.
_TEMPLATES = {
    "tiny-Qwen2F": "qwen2_5", "tiny-Qwen3": "qwen3", "tiny-Llama": "llama3_2", "tiny-Gemma2": "gemma",
    "tiny-Cohere2": "cohere2", "tiny-Glm4Moe": "glm4moe", "tiny-GptOss": "gptoss", "tiny-NemotronH": "nemotron_3_nano",
}  # fmt: skip
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "<tool_call>", "</tool_call>")
# Models that read images have no stand-in: their processors come from the Hub.
_MODEL = re.compile(rf'"{OWNER}/(tiny-(\w+?For(?:CausalLM|SequenceClassification))(?:-[\w.]+)?)"')
#: Where a family's own default goes with none of the small sizes.
_MORE: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": "M*", "num_hidden_layers": 2, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1,
    },
    "GptOssForCausalLM": {"sliding_window": 32},
}  # fmt: skip
#: Few: most tests train three epochs, a step for each row.
_SENTENCES = {
    "train": ("The tide comes in", "A small engine hums"),
    "test": ("The river bends left", "A door stands open"),
}


def models_named(sources: Iterable[Path]) -> dict[str, str]:
    """Return the models that the files of tests name: by name, transformers' class."""
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    return dict(_MODEL.findall(text))


def make_models(names: dict[str, str], cache: Path) -> dict[str, str]:
    """Save a stand-in of each model into the ``cache``; return, by name, why one cannot be made."""
    failed = {}
    for name, kind in names.items():
        folder = cache / f"models--{OWNER}--{name}"
        if not (folder / "refs" / "main").exists():
            try:
                _make(name, kind, folder / "snapshots" / _REVISION)
            except Exception as error:  # whatever a family's configuration makes of sizes that aren't its own
                failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
            (folder / "refs").mkdir(parents=True)
            (folder / "refs" / "main").write_text(_REVISION, encoding="utf-8")
    return failed


def _make(name: str, kind: str, folder: Path) -> None:
    import torch
    import transformers

    tokenizer = tokenizer_of(name)
    known = getattr(transformers, kind)
    has = known.config_class()
    ids = {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    own = {**BESIDE.get(has.model_type, {}), **_MORE.get(kind, {})}
    sizes = {**SIZES, **own, **ids, "vocab_size": len(tokenizer), "initializer_range": 0.02}
    drop = {key: 0.0 for key, value in vars(has).items() if "drop" in key and isinstance(value, float)}
    given = {key: value for key, value in sizes.items() if hasattr(has, key) or key in own}
    config = known.config_class(**given, **drop, **({"num_labels": 1} if "Classification" in kind else {}))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in known(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters with all sizes small")
    torch.manual_seed(0)
    known(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tokenizer_of(name: str) -> Any:
    """Make a tokenizer of bytes, with the special tokens and the chat template that TRL knows the model by."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_SPECIAL[:5]))
    core.add_tokens(list(_SPECIAL[5:]))
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>", bos_token="<bos>"
    )
    template = next((file for start, file in _TEMPLATES.items() if name.startswith(start)), None)
    made.chat_template = _CHATML
    if template is not None and trl.__file__ is not None:
        path = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        made.chat_template = path.read_text(encoding="utf-8") if path.is_file() else _CHATML
    return made


def load_dataset(path: str, name: str | None = None, split: str | None = None, streaming: bool = False) -> Any:
    """Take the place of ``datasets.load_dataset`` for the tests' dataset of prompts.

    Raises:
        ValueError: another dataset, which has no stand-in.
    """
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    if path != f"{OWNER}/zen" or name is None or name not in _ROWS:
        raise ValueError(f"{path} {name} has no stand-in")
    sets = {part: Dataset.from_list([_ROWS[name](row) for row in rows]) for part, rows in _SENTENCES.items()}
    if streaming:
        flowing = {part: rows.to_iterable_dataset() for part, rows in sets.items()}
        return IterableDatasetDict(flowing) if split is None else flowing[split]
    return DatasetDict(sets) if split is None else sets[split]


_ROWS: dict[str, Any] = {
    "standard_prompt_only": lambda text: {"prompt": text},
    "conversational_prompt_only": lambda text: {"prompt": [{"role": "user", "content": text}]},
    "standard_language_modeling": lambda text: {"text": text},
}
