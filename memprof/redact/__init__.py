"""Remove paths, hosts, names, command lines and tokens, so that a report can be shared.

Plain data (a report, an explanation) is copied and the copy cleaned. A snapshot is cleaned in place before it is
written. A file made elsewhere names its machine and user in some places (``node``, home directories, the values of
private settings): these names then go everywhere. Figures, categories, module names, functions and line numbers stay,
because a report is about them.

Tokens are found by the patterns of detect-secrets' plugins and by those of services that it lacks. Its patterns that
take more than linear time on a text that somebody made for it, or that match names of code, are left out.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeGuard

from memprof.frame_paths import library_path, own_folders, short_path
from memprof.redact.secret_names import hides, names_secret, split_camel, texts_in, words_of
from memprof.vocabulary import Category, Evidence, Group, History, Kind, Phase

HIDDEN = "<redacted>"

_ENVIRONMENTS = r"env(?:iron(?:ment)?)?|argv|cmd(?:line)?|command(?:_?line)?"
# Settings that name people and places; see :func:`names_secret` for those that name secrets.
_PLACE = re.compile(
    r"(?i)(?:^|[_.-])(?:host[_-]?(?:name)?|node(?:name|list)|user(?:[_-]?name)?|login|logname|e?mail|entity"
    rf"|organi[sz]ation|cwd|{_ENVIRONMENTS}|master_addr|ip(?:_?address)?)(?:$|[_.-])"
)
_ENVIRONMENT = re.compile(rf"(?i){_ENVIRONMENTS}")
_NO_PLACE = {"user_metadata", "env_name", "env_id", "environment_name"}
# A name that ends so is of memory, of a text or of a reinforcement-learning environment.
_NO_PLACE_ENDINGS = ("_memory", "_offload", "_prompt", "_factory", "_class", "_type", "_turn", "_simulator")
# A reinforcement-learning environment's name, where variables would have an equals sign.
_ENV_NAME = re.compile(r"(?i)env(?:ironment)?s?")
_ANYWHERE = ("localhost", "0.0.0.0", "127.0.0.1", "::1", "::")  # addresses that every machine has
_NAME, _NUMBER = re.compile(r"[A-Za-z_][\w.-]{0,60}"), re.compile(r"\d+[)\]},;:]*")
_SECRETS = re.compile(
    # Hubs and services of models.
    r"\b(?:hf|api_org|r8|gsk|jina)_[A-Za-z0-9]{16,}\b|\b(?:rpa|fw)_(?=[A-Za-z]{0,40}\d)[A-Za-z0-9]{16,}\b|\b(?:nvapi|xai|pplx|tvly|csk)-[A-Za-z0-9_-]{16,}"
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}\b|\b(?:wandb_v1|tgp_v1|lsv2_[ps][tk]|dop_v1)_[A-Za-z0-9_-]{16,}"
    r"|\b(?:lin_api|ntn|figd|glsa|glc|shp(?:at|ss|ca|pa)|fo1|pscale_(?:tkn|pw|oauth)|sntry[su])_[A-Za-z0-9_=+/.-]{12,}"
    r"|\b(?:PMAK|NRAK|HRKU|CFPAT|tskey)-[A-Za-z0-9_-]{12,}|\ba[ks]-(?=[A-Za-z]{0,40}\d)[A-Za-z0-9]{16,}\b|\bATATT[A-Za-z0-9_=+/-]{12,}"
    r"|\bATBB[A-Za-z0-9]{12,}|\bAGE-SECRET-KEY-[A-Za-z0-9]{12,}|\b[A-Za-z0-9]{6,20}\.atlasv1\.[A-Za-z0-9_=-]{12,}"
    r"|\bdp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9._-]{12,}|\bsecret_(?=[A-Za-z]{0,40}\d)[A-Za-z0-9]{16,}"
    # Whatever else has a short prefix and a body of letters with three groups of digits, as random ones have.
    r"|(?<![\w./-])[A-Za-z][A-Za-z0-9]{1,9}[_-](?=(?:[A-Za-z]{1,40}\d{1,6}){3}|\d{1,6}(?:[A-Za-z]{1,40}\d{1,6}){2})"
    r"[A-Za-z0-9]{24,}(?![\w-])"
    # Code and packages.
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_[A-Za-z0-9_]{20,}\b"
    r"|\bgl(?:pat|rt|rtr|dt|ptt|ft|soat|ffct|cbt|imt|agent|oas|wt)-[A-Za-z0-9_-]{16,}"
    r"|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[A-Za-z0-9_-]{16,}|\bdckr_pat_[A-Za-z0-9_-]{10,}"
    # Clouds and secret stores.
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}|\bya29\.[A-Za-z0-9_-]{10,}|\bGOCSPX-[A-Za-z0-9_-]{16,}"
    r"|\bdapi[0-9a-f]{32}(?:-\d)?\b|\bhv[bsr]\.[A-Za-z0-9_-]{16,}|\bsig=[A-Za-z0-9%+/_-]{8,}=*"
    r"|\b(?=[a-z0-9]{6}\.[a-z]{0,15}\d)[a-z0-9]{6}\.[a-z0-9]{16}\b"  # a cluster's bootstrap token
    # Messages and payments.
    r"|\bxox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{10,}|\b[srp]k_(?:live|test)_[A-Za-z0-9]{8,}"
    r"|\b\d{8,10}:[A-Za-z0-9_-]{30,}|\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
    # Forms that many services share.
    r"|\bey[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{5,}"
    r"|-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----)[\s\S]){0,16000}"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)?"
    r"|PuTTY-User-Key-File-\d(?:(?!Private-MAC)[\s\S]){0,16000}(?:Private-MAC: ?[0-9a-f]+)?"
    r"|\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\S{1,40}) AAAA[A-Za-z0-9+/]{8,}=*(?: [^\s,;\"']+)?"
    r"|\bmachine\s{1,9}\S{1,200}\s{1,9}(?:login\s{1,9}\S{1,200}\s{1,9})?password\s{1,9}\S{1,400}"
    r"(?:\s{1,9}login\s{1,9}\S{1,200})?"
    r"|(?i:\b(?:bearer|apikey)\s{1,9}|\b(?:token|secret|password|api[_-]?key)\t{1,9})(?=[^\s\d]{0,400}\d|\S{0,400}?[a-z][A-Z]|\S{24})[A-Za-z0-9._~+/-]{8,}=*"
)
# Forty hexadecimal digits are a key of Weights & Biases, unless a word before them says that they are git's.
_HASH = re.compile(
    r"((?<![A-Za-z])(?i:commit|revision|rev|sha|git|hash|checkout|head|tree|ref|tag)(?i:[ _-]?(?:hash|id|sha))?1?"
    r"[\"'\]]{0,2}[ \t]{0,3}(?:[=:@(]|(?:is |now |at ){1,3})?[ \t]{0,3}[\"']?)?\b[0-9a-f]{40}\b"
)
_COMMIT, _VERSION = re.compile(r"[0-9a-f]{40}"), re.compile(r"v?\d[\d.]{0,40}(?:[+-][\w.]{1,60})?")
_GIT_NAME = re.compile(r"(?i)(?:.*[_-])?(?:commit|revision|sha1?|git|hash|head)(?:[_-](?:hash|id|sha))?")
#: Plugins of detect-secrets whose patterns are used, by module.
_PLUGINS = {
    "aws": "AWSKeyDetector", "azure_storage_key": "AzureStorageKeyDetector", "discord": "DiscordBotTokenDetector",
    "github_token": "GitHubTokenDetector", "gitlab_token": "GitLabTokenDetector", "mailchimp": "MailchimpDetector",
    "pypi_token": "PypiTokenDetector", "sendgrid": "SendGridDetector", "slack": "SlackDetector",
    "square_oauth": "SquareOAuthDetector", "stripe": "StripeDetector", "telegram_token": "TelegramBotTokenDetector",
    "twilio": "TwilioKeyDetector",
}  # fmt: skip
# Addresses of mail, and of logins: a name at a machine.
_EMAIL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@[^\W\d_][\w.-]{1,255}\b(?::[\w./~-]{1,200})?")
# Machines in prose: of a network of its own, or with a number or a hyphen in its first part.
_MACHINE = re.compile(
    r"(?<![\w.-])(?:[a-z0-9-]{1,63}\.){2,6}(?:internal|corp|lan|intranet|localdomain)\b(?![.(-])"
    r"|(?<![\w.-])(?![\w.-]{1,120}\.(?:weight|bias|grad)\b)(?=[a-z]{1,30}-?\d|[a-z]{1,30}-[a-z0-9])[a-z0-9-]{1,63}\.(?:[a-z0-9-]{1,63}\.){1,6}"
    r"(?:local|com|net|org|io|ai|dev|edu|gov|cloud)\b(?![.(-])"
)
_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,40})://[^\s'\"]+", re.IGNORECASE)
_ADDRESS = re.compile(
    r"(?:(?<![\w.-])(?P<before>[A-Za-z][\w.-]{1,30})(?:[:=][ \t]{0,3}|[ \t]{1,3}|-))?"
    r"(?<![\d.])(?<![=<>~]=)(?<![Vv]ersion )(?!(?:0\.0\.0\.0|127\.0\.0\.1)(?![\d.]))"
    r"(?P<address>(?:\d{1,3}\.){3}\d{1,3})(?![\d.])(?::\d+)?"
    r"|(?<![\w:])(?=[0-9a-fA-F:]{0,39}(?:\d[0-9a-fA-F]{0,3}::[0-9a-fA-F]*\d|(?::[0-9a-fA-F]{1,4}){4}))[0-9a-fA-F:]{4,39}(?![\w:])"
)
# What a version follows, and not an address.
_VERSIONED = re.compile(
    r"(?i)(?:torch|nvidia|cu|rocm|flash|triton|lib)[\w.-]*|accelerate|bitsandbytes|datasets|deepspeed|driver|hip|jax|memprof"
    r"|nccl|numpy|peft|python|ray|release|tensorflow|toolkit|transformers|trl|unsloth|vllm|\w*version|xformers"
)
# A name and its value, as in a command line or an environment: NAME=value, --name value, "name": "value", and Name:
# value if the name is a secret's. Between quotes a value may hold spaces; elsewhere a comma ends it if a space or
# another setting follows.
_PLAIN_VALUE = r"(?:[^\s,;\"']|[,;](?!\s|$|[\w.-]{1,60}\s?[=:])){0,400}"
_VALUE = rf"((?<=')[^'\n]{{1,4000}}|(?<=\")[^\"\n]{{1,4000}}|[^\s,;\"'{{\[(]{_PLAIN_VALUE})"
_SPACED = r"(?:(?<=api|API|Api|ate|ess|ret)[ ](?:[Kk]ey|KEY)|(?<=eed|ery)[ ][Pp]hrase)?"
_SCHEME = r"(?i:(?:basic|bearer|token|digest|negotiate|apikey|aws4-hmac-sha256)[ \t]+)?"
_SETTING = re.compile(
    rf"(?<![\w.-])(--[A-Za-z][\w-]{{0,60}})(=[\"']?|(?:[\"'],)?[ ][\"']?(?!-)){_VALUE}"
    rf"|(?<![\w.-])([A-Za-z_][\w.-]{{0,60}})([\"']?\s?(?:=\s?|:\s?(?=[\"']))[\"']?){_VALUE}"
    rf"|(?<![\w.-])(?P<header>[A-Za-z_][\w.-]{{0,60}}{_SPACED})"
    rf"([\"']?:[ \t]+{_SCHEME}|[ \t]?=[ \t]?[\"']?){_VALUE}"
)
# The same in a text that was quoted again, and as elements of XML.
_ESCAPED = re.compile(
    r"(?P<quote>\\{1,7}[\"'])(?P<name>[\w.-]{1,60})(?P=quote)(?P<between>\s?[:=]\s?)(?P=quote)"
    r"(?P<value>(?:(?!(?P=quote)).){1,4000})"
)
_ELEMENT = re.compile(
    r"<(?P<name>[A-Za-z][\w.:-]{0,60})(?P<between>(?:\s[^<>]{0,200})?>(?:<!\[CDATA\[)?)(?P<value>[^<]{1,4000})(?=</)"
)
_NAMED_ELEMENT = re.compile(
    r"(?i:\b(?:name|key|id))\s?=\s?[\"'](?P<name>[\w.:-]{1,60})[\"'](?P<between>[^<>]{0,200}(?<!/)>(?:<!\[CDATA\[)?)"
    r"(?P<value>[^<]{1,4000})(?=</)"
)
# The same in code: environ["NAME"] = "value", name=b"value", name=Secret("value"), "name" => "value".
_LITERAL = re.compile(
    r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]{0,60})"
    r"(?P<between>[\"']?\]?\s?(?:=>|:=|[=:])\s{0,20}(?:[A-Za-z_][\w.]{0,30}\()?"
    r"[bBrRuUfF]{0,2}(?P<quote>\"{3}|'{3}|[\"']))"
    # A quote may be escaped, or doubled as in YAML.
    r"(?P<value>(?:\\.|(?!(?P=quote))[^\n])(?:\\.|(?P=quote){2}(?=\w)|(?!(?P=quote))[^\n]){0,4000})"
)
# The same without a space, name:value, name:=value, and with the signs of Chinese and Japanese texts.
_TIGHT = re.compile(
    r"(?<![\w.:/-])(?P<name>[A-Za-z_][\w-]{1,60})(?P<between>\s?:=\s?|:|[ \t]?[\uff1a\uff1d][ \t]?[\"']?)"
    r"(?P<value>[^\s,;\"'{}\[\]()<:/=][^\s,;\"'{}\[\]()<]{2,400})"
)
# A line of YAML under whose name a block follows, and one whose value goes on to the end of the line.
_BLOCK_LINE = re.compile(
    r"([ \t]*(?:- )?)[\"']?([A-Za-z_][\w.-]{0,60})[\"']?:[ \t]*(?:[|>][+\d-]{0,2}|[!&][^\s]{1,60})?[ \t\r]*"
)
_PLAIN_LINE = re.compile(r"([ \t]*(?:- )?[\"']?([A-Za-z_][\w.-]{0,60})[\"']?:[ \t]+)([^\s\"'\[{(|>][^\n]*[ \t][^\n]*)")
# An option with one hyphen, as of Go's programs and Java's properties: -password x, -Ddb.password=x.
_DASHED = re.compile(
    rf"(?<![\w.-])-D?(?P<name>[A-Za-z][\w.-]{{1,60}})(?P<between>=[\"']?|[ ][\"']?(?!-))(?P<value>{_VALUE})"
)
# The name and the value as two settings, as Kubernetes lists variables.
_PAIR = re.compile(
    r"(?P<name>\b(?i:name|key|variable|field|header)[\"']?\s?[:=]\s?[\"']?(?P<what>[\w.-]{1,60})[\"']?(?:,\s{0,20}|\s{1,20})"
    r"[\"']?(?i:val|value|content)[\"']?\s?[:=]\s?)"
    rf"(?P<between>[\"']?)(?P<value>{_VALUE})"
)
# The same as a list of two, or as the last arguments of setattr.
_LIST_OF_TWO = re.compile(
    r"(?:(?<=[\[(])|(?<=\w,\s))(?P<quote>\\{0,7}[\"'])(?P<name>[\w.-]{1,60})(?P=quote),\s?(?P=quote)"
    r"(?P<value>(?:(?!(?P=quote))[^\n]){1,4000})(?=(?P=quote)\s?[\])])"
)
# A key in a dictionary or a block of YAML, whose name tells what it is a key to.
_KEY_INSIDE = re.compile(
    r"(?<![\w.-])(?P<what>[A-Za-z_][\w.-]{0,60})(?P<between>\\{0,7}[\"']?\s?[:=]\s?\{[^{}]{0,300}?(?<![\w.-])\\{0,7}[\"']?"
    rf"keys?\\{{0,7}}[\"']?\s?[:=]\s?\\{{0,7}}[\"']?)(?P<value>(?<=[\"'])[^\"'\n\\]{{1,4000}}|[^\s,;\"'{{\[(]{_PLAIN_VALUE})"
)
_KEY_LINE = re.compile(r"(?P<start>[ \t]*[\"']?keys?[\"']?:[ \t]+)(?P<value>[^\s{\[][^\n]*)")
_NAMED = (
    _ESCAPED, _ELEMENT, _NAMED_ELEMENT, _LITERAL, _TIGHT, _DASHED, _PAIR, _LIST_OF_TWO, _KEY_INSIDE,
)  # fmt: skip
# A list or a dictionary under a name.
_CONTAINER = re.compile(r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]{0,60})\\{0,7}[\"']?\s?[:=]\s?(?=[\[{(])")
_LONGEST_CONTAINER = 20_000
# What in it is no text: its keys, flags and special tokens.
_NO_TEXT = re.compile(r"[\"'\\]{0,9}[\w.-]{1,60}[\"'\\]{0,9}\s?:|\b(?:True|False|None|true|false|null)\b|<[^<>]{0,40}>")
# The name of a user's folder.
_HOME = re.compile(
    r"(?:/home|/Users|[A-Za-z]:[\\/]{1,2}Users)[\\/]{1,2}"
    r"([^\s/\\:*?\"<>|][^/\\:*?\"<>|\n]{0,60}?)(?=[/\\\s\"':]|$)"
)
# Fields that hold the name of a setting, and those that hold its value.
_NAME_FIELDS, _VALUE_FIELDS = (
    ("name", "key", "variable", "field", "header"), ("value", "val", "default", "data", "content"),
)  # fmt: skip
_NUMBERED = re.compile(r"(?:node-)?\d+")
_NAMING_KEY = re.compile(r"(?i)(?:^|[_.-])(?:node|host(?:name)?|user(?:_?name)?|login)$")

# A path has two parts or more. Below a root, a part may hold spaces but not begin or end with one. Lengths are bounded
# so that matching takes linear time on any text.
_PART = r"[^\s/\\:*?\"<>|](?:[^/\\:*?\"<>|\n]{0,120}[^\s/\\:*?\"<>|])?"
_WORD = r"[^\s/\\:*?\"<>|()]{1,120}"
_PATH = re.compile(
    rf"(?<![\w.…/\\])(?:(?:[A-Za-z]:|~)?[/\\]{{1,2}}{_PART}(?:[/\\]+{_PART})+|{_WORD}(?:[/\\]+{_WORD})+)"
)

# User and host names that identify nobody and occur in ordinary text.
_GENERIC = {
    "root", "user", "ubuntu", "admin", "localhost", "home", "runner", "jovyan", "main", "train", "python", "model",
    "trl", "torch", "demo", "memprof", "report", "cuda", "none", "null", "true", "false", "auto", "default",
    *_ANYWHERE, *(str(word) for words in (Category, Evidence, Group, History, Kind, Phase) for word in words),
}  # fmt: skip


def redact(data: Any, beside: Any = None) -> Any:
    """Return a copy of plain data with every string cleaned and every private setting hidden.

    Args:
        data: a report, or a part of one.
        beside: what else is known of the run; the names that it gives away go too.
    """
    clean = _cleaner({*_names_in(data), *_names_in(beside)})
    cleaned = _walk(data, clean)
    if isinstance(cleaned, dict) and isinstance(cleaned.get("source"), dict):
        _rename_places(cleaned, data)
    return cleaned


def _places(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a report that name a machine; the ranks first."""
    across = report.get("across_ranks")
    nodes = across.get("nodes") or [] if isinstance(across, dict) else []
    return [part for part in (*(report.get("ranks") or []), report["source"], *nodes) if isinstance(part, dict)]


def _rename_places(cleaned: dict[str, Any], report: dict[str, Any]) -> None:
    """Leave files their last name, and put numbers in the place of the machines' names, which tell who owns them."""
    known: dict[str, str] = {}
    for place, named in zip(_places(cleaned), _places(report), strict=True):
        if isinstance(named.get("node"), str):
            place["node"] = known.setdefault(named["node"], f"node-{len(known)}")
        if isinstance(place.get("file"), str):
            place["file"] = _last_part(place["file"])
        if isinstance(place.get("files"), list):
            place["files"] = [_last_part(str(name)) for name in place["files"]]


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def redact_text(text: str) -> str:
    """Return one string, cleaned; whose homes it names is hidden too."""
    return _cleaner(_HOME.findall(text))(text)


# Parts of memprof's own key that are figures.
_FIGURES = {"schema", "kind", "steps", "samples", "buckets", "recorded"}


def redact_snapshot(raw: dict[str, Any]) -> None:
    """Clean a raw snapshot in place: the file names of all frames, what other tools wrote beside its events, and the
    text under the ``"memprof"`` key.
    """
    extra = raw.get("memprof", {})
    own = [*(extra.pop("own_folders", None) or []), *own_folders()]
    extra.pop("sources", None)
    seen: set[int] = set()
    names = {*_names_in(extra), *_names_in(raw.get("external_annotations"))}
    clean = _cleaner(names)
    clean_tag = lru_cache(maxsize=None)(partial(_tag, clean=clean))
    holders = [*raw.get("segments", []), *(b for s in raw.get("segments", []) for b in s.get("blocks", []))]
    holders += [event for trace in raw.get("device_traces", []) for event in trace]
    for holder in holders:
        frames, told = holder.get("frames"), holder.get("user_metadata")
        if isinstance(told, str) and told:
            holder["user_metadata"] = clean_tag(told)
        if not isinstance(frames, list) or id(frames) in seen:  # most lists are shared between events
            continue
        seen.add(id(frames))
        for frame in frames:
            if id(frame) not in seen:
                seen.add(id(frame))
                frame["filename"] = _own_path(frame.get("filename", ""), own) or short_path(frame.get("filename", ""))
    if extra:
        extra["redacted"] = True
    extra.update({name: _walk(value, clean) for name, value in extra.items() if value and name not in _FIGURES})
    if raw.get("external_annotations"):
        raw["external_annotations"] = _walk(raw["external_annotations"], clean)


def _tag(text: str, clean: Callable[[str], str]) -> str:
    """Clean what stands beside an allocation: of memprof's own tags each value, such as a phase that a user named."""
    if not text.startswith("memprof:"):
        return clean(text)
    return re.sub(r"(?<=[:;])([A-Za-z_]\w*=)?([^;]+)", lambda field: (field[1] or "") + clean(field[2]), text)


def _names_in(data: Any) -> set[str]:
    """Return the names of machines and users, and the secrets, that plain data gives away by where they stand."""
    found: set[str] = set()
    waiting = [("", data)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, str):
            found.update(_HOME.findall(value))
            if _NAMING_KEY.search(name):
                found |= {value, value.split(".")[0]}
        elif isinstance(value, (dict, list, tuple)):
            members = _members(value)
            hidden = _hidden_members(name, value)
            found.update(filter(_worth_finding, texts_in([inner for key, inner in members if key in hidden])))
            waiting += [(str(key), inner) for key, inner in members]
    return found


def _members(value: dict[Any, Any] | Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the members of a dictionary or a list, by key or place."""
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _hidden_members(name: str, value: dict[Any, Any] | Sequence[Any]) -> set[Any]:
    """Return the keys, or places, of what is to be hidden in a dictionary or list that is called ``name``."""
    if isinstance(value, dict):
        private = {key for key, inner in value.items() if _private(str(key), inner)}
        return {*private, *_hidden_fields(value), *_keys_of(name, value)}
    if _is_secret_pair(value):
        return {1}
    # An option of a command line stands in front of its value.
    return {at for at, (option, item) in enumerate(pairwise(value), 1) if _is_option(option) and hides(option, item)}


def _is_option(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.startswith("-") and "=" not in value


def _worth_finding(text: str) -> bool:
    """Tell whether a hidden value is told from ordinary words, so that it can be hidden wherever it stands."""
    return len(text) > 5 and (any(c.isdigit() for c in text) or len(text) > 11 or not text.isalpha())


def _hidden_fields(value: dict[Any, Any]) -> list[str]:
    """Return the fields that hold a secret of which another one has the name."""
    named = next((value[field] for field in _NAME_FIELDS if isinstance(value.get(field), str)), None)
    return [] if named is None else [field for field in _VALUE_FIELDS if hides(named, value.get(field))]


def _keys_of(name: str, inner: dict[Any, Any]) -> list[Any]:
    """Return the fields of a dictionary called ``name`` that hold a key to it: ``{"api": {"key": x}}``."""
    if "value" in inner or "val" in inner:
        return []
    return [key for key, value in inner.items() if str(key).lower() in ("key", "keys") and hides(f"{name}.key", value)]


def _is_secret_pair(value: Sequence[Any]) -> bool:
    """Tell whether a list is the name of a setting and a secret, as headers are."""
    if len(value) != 2 or not all(isinstance(part, str) for part in value) or not _NAME.fullmatch(value[0]):
        return False
    # One word such as "token" may be the name of a column, next to another one.
    return hides(*value) and (
        names_secret(value[0]) == "always" or len(words_of(value[0])) > 1 or _worth_finding(value[1])
    )


def _walk(value: Any, clean: Callable[[str], str], name: str = "") -> Any:
    if isinstance(value, str):
        return value if _is_figure(name, value) else clean(value)
    if not isinstance(value, (dict, list, tuple)):
        return value
    hidden = _hidden_members(name, value)
    if isinstance(value, dict):
        return {
            _key(str(k), clean): HIDDEN if k in hidden else _walk(inner, clean, str(k)) for k, inner in value.items()
        }
    return [HIDDEN if at in hidden else _walk(inner, clean) for at, inner in enumerate(value)]


def _is_figure(name: str, value: str) -> bool:
    """Tell whether a setting is a commit of git or a version, by its name."""
    if _COMMIT.fullmatch(value):
        return _GIT_NAME.fullmatch(name) is not None
    return _VERSION.fullmatch(value) is not None and _VERSIONED.fullmatch(name) is not None


def _key(key: str, clean: Callable[[str], str]) -> str:
    """Clean a key; a field keeps its name, whatever a machine is called."""
    return key if key.isidentifier() and key.islower() and len(key) < 32 else clean(key)


def _names_place(key: str) -> bool:
    named = _PLACE.search(key) is not None
    return named and key not in _NO_PLACE and not key.endswith(_NO_PLACE_ENDINGS)


def _private(key: str, value: Any) -> bool:
    """Tell whether a setting, of data or in a text, contains a secret, or anything but a number under the name of a
    person or a place."""
    is_number = isinstance(value, str) and _NUMBER.fullmatch(value)
    if isinstance(value, (str, list, tuple)) and not is_number and _names_place(key := split_camel(key)):
        is_name = _ENV_NAME.fullmatch(key) and isinstance(value, str) and _NAME.fullmatch(value)
        return not is_name and value not in _ANYWHERE
    if isinstance(value, dict) and _ENVIRONMENT.fullmatch(key):
        return True
    return hides(key, value)


def _setting_in_text(match: re.Match[str]) -> str:
    name, between, value = (part for part in match.groups()[:9] if part is not None)
    if match["header"] is not None:
        place = re.fullmatch(r"(?i)host_?name|user_?name", name) is not None
        hidden = (place and not _NUMBER.fullmatch(value)) or hides(name, value, prose=not _at_start(match))
    else:
        hidden = _private(name.removeprefix("--").replace("-", "_"), value)
    return f"{name}{between}{HIDDEN if hidden else _SETTING.sub(_setting_in_text, value)}"


def _address_in_text(match: re.Match[str]) -> str:
    address = match["address"]
    if address is None:
        return HIDDEN
    is_version = any(int(part) > 255 for part in address.split(".")) or _VERSIONED.fullmatch(match["before"] or "")
    return match[0] if is_version else match[0][: match.start("address") - match.start()] + HIDDEN


def _at_start(match: re.Match[str]) -> bool:
    """Tell whether a setting stands at the start of a line, of a dictionary or of a list, as prose does not."""
    before = match.string[max(0, match.start() - 100) : match.start()].rstrip(" \t-")
    return before == "" or before[-1] in "\n{[,"


def _named_in_text(match: re.Match[str]) -> str:
    name = f"{match['what']}.key" if match.re is _KEY_INSIDE else match.groupdict().get("what") or match["name"]
    is_words = match.re is _LIST_OF_TWO and not _is_secret_pair((name, match["value"]))
    if is_words or not hides(name.rpartition(":")[2], match["value"]):
        return match[0]
    return match[0][: match.start("value") - match.start()] + HIDDEN


def _without_lines(text: str) -> str:
    """Hide what stands under the name of a secret in YAML: the rest of the line, or the lines of a block."""
    if ":" not in text:
        return text
    kept: list[str] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        plain = _PLAIN_LINE.fullmatch(line)
        is_secret = plain is not None and names_secret(plain[2]) == "always" and hides(plain[2], plain[3])
        if plain is not None and is_secret and not re.fullmatch(rf"{_SCHEME}\S+", plain[3]):
            line = f"{plain[1]}{HIDDEN}"
        kept.append(line)
        head = _BLOCK_LINE.fullmatch(line)
        if head is None:
            continue
        if at < len(lines) and (key := _KEY_LINE.fullmatch(lines[at])) and _goes_on(lines[at], len(head[1])):
            lines[at] = f"{key['start']}{HIDDEN}" if hides(f"{head[2]}.key", key["value"]) else lines[at]
        if not names_secret(head[2]):
            continue
        start, indent = at, len(head[1])
        while at < len(lines) and _goes_on(lines[at], indent):
            at += 1
        if _hides_inside(head[2], "\n".join(lines[start:at])):
            kept.append(f"{' ' * (indent + 2)}{HIDDEN}")
        else:
            kept += lines[start:at]
    return "\n".join(kept)


def _hides_inside(name: str, text: str) -> bool:
    """Tell whether a list, a dictionary or a block under a name contains a secret: any of its values, as in data."""
    return hides(name, re.split(r"[\s,()\[\]{}\"'\\]+|(?<=\s)-(?=\s)", _NO_TEXT.sub("", text)))


def _goes_on(line: str, indent: int) -> bool:
    """Tell whether a line belongs to the block of YAML under a name that is indented so far."""
    inner = line.lstrip(" \t")
    return not inner or len(line) - len(inner) > indent or (len(line) - len(inner) == indent and inner[:2] == "- ")


def _without_containers(text: str) -> str:
    """Hide the lists and dictionaries that stand under the name of a secret."""
    found, at = [], 0
    for match in _CONTAINER.finditer(text):
        if match.start() < at or not names_secret(match["name"]):
            continue
        end = _closing(text, match.end())
        if _hides_inside(match["name"], text[match.end() : end]):
            found += [text[at : match.end()], HIDDEN]
            at = end
    return "".join([*found, text[at:]])


def _closing(text: str, start: int) -> int:
    """Return where the bracket at ``start`` is closed; the end of the line where it is not."""
    depth = 0
    for at in range(start, min(len(text), start + _LONGEST_CONTAINER)):
        depth += (text[at] in "[{(") - (text[at] in ")}]")
        if not depth:
            return at + 1
    line = text.find("\n", start)
    return len(text) if line < 0 else line


def _cleaner(told: Iterable[str] = ()) -> Callable[[str], str]:
    """Return what cleans a text; ``told`` are names to hide beside those of this machine and user."""
    names = _worth_hiding({*_own_names(), *told})
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(n)}(?!\w)" for n in names)) if names else None

    @lru_cache(maxsize=65536)  # stacks repeat their frames
    def clean(text: str) -> str:
        text = _SECRETS.sub(HIDDEN, text)
        text = _HASH.sub(lambda match: match[0] if match[1] else HIDDEN, text)
        text = _library_secrets().sub(HIDDEN, text)
        text = _without_containers(_without_lines(text))
        for named in _NAMED:
            text = named.sub(_named_in_text, text)
        text = _SETTING.sub(_setting_in_text, text)
        text = _EMAIL.sub(HIDDEN, text)
        text = _URL.sub(rf"\1://{HIDDEN}", text)
        text = _ADDRESS.sub(_address_in_text, text)
        text = _MACHINE.sub(HIDDEN, text)
        text = _paths(text)
        return pattern.sub(HIDDEN, text) if pattern else text

    return clean


@cache
def _library_secrets() -> re.Pattern[str]:
    """Return the patterns of detect-secrets that are used, as one. Importing it takes a third of a second."""
    found = []
    for name, plugin in _PLUGINS.items():
        detector = getattr(import_module(f"detect_secrets.plugins.{name}"), plugin)
        for pattern in detector.denylist:
            flags = "i" if pattern.flags & re.IGNORECASE else ""
            # None of them names a group or refers to one, so that they can stand beside each other.
            found.append(f"(?{flags}:{pattern.pattern})")
    return re.compile("|".join(found))


def _paths(text: str) -> str:
    return _PATH.sub(_path_in_text, text) if "/" in text or "\\" in text else text


def _own_path(path: str, own: Iterable[Sequence[str]]) -> str | None:
    """Return the import path of a file of memprof that lies beside the package, as in an editable install."""
    slashed = path.replace("\\", "/")
    return next((f"{name}/{slashed[len(folder) :]}" for folder, name in own if slashed.startswith(folder)), None)


def _path_in_text(match: re.Match[str]) -> str:
    """Apply :func:`short_path`, except to relative paths, which may be a model's name or two words."""
    path = match.group()
    absolute = path[0] in "/\\~" or path[1:2] == ":"
    return library_path(path) or (f"…/{short_path(path)}" if absolute else path)


def _own_names() -> set[str]:
    found = {socket.gethostname(), socket.gethostname().split(".")[0], os.path.basename(os.path.expanduser("~"))}
    with contextlib.suppress(KeyError, OSError):
        found.add(getpass.getuser())
    return found


def _worth_hiding(names: Iterable[str]) -> list[str]:
    """Return the names, longest first, without short and generic ones."""
    generic = (n for n in names if n.lower() in _GENERIC or HIDDEN in n or _NUMBERED.fullmatch(n))
    kept = (n for n in {*names}.difference(generic) if len(n) > 2)
    return sorted(kept, key=len, reverse=True)[:1000]
