"""Decide whether a setting's name is a secret's, and whether its value is worth hiding: one rule for data and for text.

:func:`names_secret` is about the name, :func:`hides` about the name with its value. How settings are found in a text is
:mod:`memprof.redact`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

# A name is split at underscores, hyphens, digits and capitals; plurals count as their singulars. Some words always name
# a secret. Others do as the last word of a name, unless another one says what else they are: eos_token, cache_key.
# Numbers, flags and special tokens of text such as <pad> are never secrets.

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ALWAYS = {
    "password", "passwd", "passphrase", "passcode", "pwd", "pw", "secret", "credential", "cred", "bearer", "jwt", "sas",
    "dsn", "webhook", "auth", "authorization", "cookie",
}  # fmt: skip
_AS_LAST_WORD = {"token", "key", "session", "pass", "pat", "signature", "sig", "otp", "hmac", "mnemonic"}
# Two words that name one together.
_TOGETHER = re.compile(r"conn\w* str(?:ing)?s?|(?:seed|recovery|secret|backup) phrases?")
# A word that ends so is two, without what separates them: PGPASSWORD, apikey, dbpass.
_ENDINGS = (
    "password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "cred", "token", "key", "pass",
)  # fmt: skip
_ONE_WORD = {
    "bypass", "compass", "encompass", "surpass", "trespass", "lowpass", "highpass", "bandpass", "sacred", "monkey",
    "hotkey", "turkey", "donkey", "jockey", "hockey", "whiskey", "pubkey", "subtoken", "multitoken",
}  # fmt: skip
# What may follow the word: hub_token_id, client-key-data.
_AFTER = {"id", "value", "data", "text", "string", "str", "base", "hex", "raw"}
# In front of the word, these say that it opens something, whatever else is there.
_OPENS = {
    "access", "account", "api", "auth", "bot", "client", "deploy", "encryption", "hub", "license", "master", "oauth",
    "personal", "private", "refresh", "secret", "service", "session", "shared", "signing", "ssh", "storage",
    "subscription", "user", "security",
}  # fmt: skip
# These say that it is a piece of text, a position in a table, a pass over data, a function's arguments.
_ELSE = {
    "token": {
        "eos", "bos", "pad", "padding", "unk", "sep", "cls", "mask", "special", "image", "video", "audio", "vision",
        "num", "n", "max", "min", "new", "next", "last", "first", "completion", "prompt", "input", "output", "total",
        "generated", "truncated", "per", "stop", "start", "end", "begin", "text", "vocab", "think", "thinking",
        "embed", "class", "boi", "eoi", "decoder", "forced", "suppress", "tool", "response", "patch", "register",
        "added", "extra", "seen", "batched", "draft", "speculative", "boundary", "fim", "prefix", "suffix", "middle",
        "reasoning", "answer", "turn", "logprob", "entropy", "rollout", "reward", "role", "mm",
    },
    "key": {
        "public", "primary", "foreign", "sort", "group", "partition", "dict", "cache", "column", "label", "prompt",
        "image", "query", "dataset", "state", "config", "metric", "input", "output", "index", "row", "hash", "reward",
        "answer", "question", "message", "completion", "field", "item", "map", "missing", "unexpected", "ignore",
        "ignored", "skip", "tied", "weight", "layer", "module", "param", "parameter", "buffer", "lookup", "json",
        "past", "attention", "attn", "self", "num", "rng", "unique", "eval", "train", "loss", "batch", "sequence",
        "kv", "tensor", "text", "arg", "sampling", "trial", "shard", "block", "encoder", "decoder", "response",
        "chosen", "rejected", "source", "target", "solution", "truth", "conversation", "tool", "video", "audio",
        "feature", "template", "adapter", "router", "expert", "norm", "rope", "gt", "data", "kwargs", "args", "option",
        "setting", "meta", "metadata", "info", "entry", "record", "value", "name", "optimizer", "log", "figure", "axis",
    },
    "pass": {"forward", "backward", "first", "second", "single", "one", "two", "multi", "extra", "per", "each", "last"},
    "signature": {"forward", "function", "call", "method", "input", "model"},
    "session": {"training", "inference", "tmux", "screen"},
}  # fmt: skip
# Texts that are no secrets under any name, and those that are none but under a name that always is one.
_EMPTY = re.compile(
    r"(?i)\s*(?:true|false|yes|no|on|off|enabled?|disabled?|required|optional|none|null|nil|auto|basic|[+-]?\d{1,3}(?:\.\d{1,3})?)?"
    r"[\s)\]},;:]*"
    r"|<redacted>"
)
# Annotations of types.
_TYPE = re.compile(
    r"(?:typing\.)?(?:str|bytes|int|float|bool|Any|object|Optional|Union|Literal|SecretStr|[Ll]ist|[Dd]ict)"
    r"(?:\[[\w\[\], .|\"']{0,80})?[)\]},;:]*"
)
_PLAIN = re.compile(
    r"(?:(?i:all|any|default|each|every|first|last|max|mean|min|missing|sum)|[+-]?[\d.,:eE+\s%-]*\d[\d.,:eE+\s%-]*"
    r"|<[^<>]{0,40}>|</?s>|\[[A-Z_]{1,20}\])[\s)\]},;:]*"
)


def hides(name: str, value: Any, prose: bool = False) -> bool:
    """Tell whether a setting holds a secret: text under a secret's name, by itself or anywhere in a container."""
    known = names_secret(name, prose)
    return bool(known) and any(_is_secret_value(name, known, text) for text in texts_in(value))


@lru_cache(maxsize=65536)
def names_secret(name: str, prose: bool = False) -> str:
    """Return ``"always"`` or ``"often"`` if a setting of this name holds a secret, else nothing.

    Args:
        name: of the setting; of a dotted one, the last part counts for words that often name a secret.
        prose: the name stands in a sentence, where one word such as "session" or "pass" says nothing.
    """
    words = words_of(name)
    kinds = [_kind(word) for word in words]
    if "always" in kinds or any(_TOGETHER.fullmatch(f"{a} {b}") for a, b in pairwise(words)):
        return "always"
    last = words_of(name.rpartition(".")[2])
    if last in (["key"], ["keys"]):
        last = words_of(".".join(name.split(".")[-2:]))
    while len(last) > 1 and last[-1] in _AFTER:
        last.pop()
    kind = _kind(last[-1]) if last else ""
    if not kind:
        return ""
    before = [word.removesuffix("s") for word in last[:-1]]
    if not before:
        return "" if kind == "key" or (prose and kind != "token") else "often"
    if before[-1] not in _OPENS and not _ELSE.get(kind, set()).isdisjoint({*before, *last[:-1]}):
        return ""
    return "often"


def _is_secret_value(name: str, known: str, text: str) -> bool:
    """Tell whether a text is worth hiding under a secret's name: no flag, type or placeholder, and no figure or common
    word unless the name always is a secret's."""
    is_placeholder = text.isupper() and {*words_of(text)} <= {*words_of(name)} and bool(words_of(text))
    if is_placeholder or _EMPTY.fullmatch(text) or _TYPE.fullmatch(text):
        return False
    return known == "always" or not _PLAIN.fullmatch(text)


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text of plain data at any depth, and every number as a text that names it has it."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, (int, float)):
            yield str(one)
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)


def split_camel(name: str) -> str:
    """Return a name with underscores in front of its capitals: ``apiKeys`` is ``api_Keys``."""
    return _CAMEL.sub("_", name)


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z]+", split_camel(name))]


def _kind(word: str) -> str:
    """Return ``"always"``, a word that often names a secret, or nothing."""
    for one in (word, word.removesuffix("s")):
        if one in _ALWAYS:
            return "always"
        if one in _AS_LAST_WORD:
            return one
        if one not in _ONE_WORD and len(one) > 5 and one.endswith(_ENDINGS):
            return "always"
    return ""
