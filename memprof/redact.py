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
from typing import Any

from memprof.frame_paths import library_path, own_folders, short_path
from memprof.vocabulary import Category, Evidence, Group, History, Kind, Phase

HIDDEN = "<redacted>"

_ENVIRONMENTS = r"env(?:iron(?:ment)?)?|argv|cmd(?:line)?|command(?:_?line)?"
# Settings whose value is hidden whatever it looks like: secrets, people and places.
_PRIVATE_KEY = re.compile(
    r"(?i)(?:^|[_.-])(?:token|secret|password|passwd|passphrase|pwd|credentials?|bearer|jwt|sas|dsn|webhook|signature"
    r"|(?:api|access|account|client|deploy|encryption|license|master|private|secret|service|shared|signing|ssh|storage"
    r"|subscription)[_-]?key|conn(?:ection)?[_-]?str(?:ing)?"
    r"|auth(?:orization)?|cookie|host[_-]?(?:name)?|node(?:name|list)|user(?:[_-]?name)?|login|logname|e?mail|entity"
    r"|organi[sz]ation|cwd"
    rf"|{_ENVIRONMENTS}|master_addr|ip(?:_?address)?)(?:$|[_.-])"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ENVIRONMENT = re.compile(rf"(?i){_ENVIRONMENTS}")
# Settings named after tokens of text, which are no secrets.
_INNOCENT_KEY = re.compile(
    r"(?i)(?:eos|bos|pad|unk|sep|cls|mask|special|image|num|max|min|completion|prompt|truncated|mask_truncated)_tokens?(?:_id|_ids)?"
    r"|(?:eos|bos|pad|unk|sep|cls|mask)_token|tokens_per|include_num_input_tokens|user_metadata|hub_strategy"
)
_SECRETS = re.compile(
    # Hubs and services of models.
    r"\b(?:hf|api_org|r8|gsk|rpa|jina|fw)_[A-Za-z0-9]{16,}\b|\b(?:nvapi|xai|pplx|tvly|csk)-[A-Za-z0-9_-]{16,}"
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}\b|\b(?:wandb_v1|tgp_v1|lsv2_[ps][tk]|dop_v1)_[A-Za-z0-9_-]{16,}"
    r"|\b[0-9a-f]{40}\b"
    # Code and packages.
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_[A-Za-z0-9_]{20,}\b|\bgl[a-z]{1,8}-[A-Za-z0-9_-]{16,}"
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
    r"|\bmachine\s{1,9}\S{1,200}\s{1,9}login\s{1,9}\S{1,200}\s{1,9}password\s{1,9}\S{1,400}"
    r"|(?i:\bbearer\s{1,9})[A-Za-z0-9._~+/-]{8,}=*"
)
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
    r"|(?<![\w.-])(?=[a-z]{1,30}-?\d|[a-z]{1,30}-[a-z0-9])[a-z0-9-]{1,63}\.(?:[a-z0-9-]{1,63}\.){1,6}"
    r"(?:local|com|net|org|io|ai|dev|edu|gov|cloud)\b(?![.(-])"
)
_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,40})://[^\s'\"]+", re.IGNORECASE)
_ADDRESS = re.compile(
    r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])(?::\d+)?"
    r"|(?<![\w:])(?=[0-9a-fA-F:]{0,39}(?:[0-9a-fA-F]::[0-9a-fA-F]*\d|(?::[0-9a-fA-F]{1,4}){4}))[0-9a-fA-F:]{4,39}(?![\w:])"
)
# A name and its value, as in a command line or an environment: NAME=value, --name value, "name": "value"; of names
# that stand for nothing else also Name: value.
# Between quotes a value may hold spaces.
_VALUE = r"((?<=')[^'\n]{1,4000}|(?<=\")[^\"\n]{1,4000}|[^\s,;\"'{\[(-][^\s,;\"']{0,400})"
_ONLY_SECRET = (
    r"passw(?:or)?d|passphrase|pwd|(?:api|access|private)[ _-]?key|secret|_token"
    r"|authorization|cookie|hostname|user_?name"
)
_SETTING = re.compile(
    rf"(?<![\w.-])(--[A-Za-z][\w-]{{0,60}})([ =][\"']?){_VALUE}"
    rf"|(?<![\w.-])([A-Za-z_][\w.]{{0,60}})([\"']?\s?(?:=\s?|:\s?(?=[\"']))[\"']?){_VALUE}"
    rf"|(?<![\w.-])((?i:[\w.-]{{0,40}}(?:{_ONLY_SECRET})))(:[ \t]+(?i:basic )?){_VALUE}"
)
# The name of a user's folder.
_HOME = re.compile(
    r"(?:/home|/Users|[A-Za-z]:[\\/]{1,2}Users)[\\/]{1,2}"
    r"([^\s/\\:*?\"<>|][^/\\:*?\"<>|\n]{0,60}?)(?=[/\\\s\"':]|$)"
)
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
    *(str(word) for words in (Category, Evidence, Group, History, Kind, Phase) for word in words),
}  # fmt: skip


def redact(data: Any, beside: Any = None) -> Any:
    """Return a copy of plain data with every string cleaned and every private setting hidden.

    Args:
        data: a report, or a part of one.
        beside: what else is known of the run; the names that it gives away go too.
    """
    clean = _cleaner({*_names_in(data), *_names_in(beside)})
    cleaned = _walk(data, clean)
    source = cleaned.get("source") if isinstance(cleaned, dict) else None
    if isinstance(source, dict) and isinstance(source.get("files"), list):
        source["files"] = [re.split(r"[/\\]", str(name))[-1] for name in source["files"]]
    if isinstance(source, dict):
        _number_nodes(cleaned, data)
    return cleaned


def _places(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a report that name a machine; the ranks first."""
    across = report.get("across_ranks")
    nodes = across.get("nodes") or [] if isinstance(across, dict) else []
    return [part for part in (*(report.get("ranks") or []), report["source"], *nodes) if isinstance(part, dict)]


def _number_nodes(cleaned: dict[str, Any], report: dict[str, Any]) -> None:
    """Put numbers in the place of the machines' names, which tell who owns them, in ``cleaned``."""
    known: dict[str, str] = {}
    for place, named in zip(_places(cleaned), _places(report), strict=True):
        if isinstance(named.get("node"), str):
            place["node"] = known.setdefault(named["node"], f"node-{len(known)}")
    for rank in _places(cleaned):
        if isinstance(rank.get("file"), str):
            rank["file"] = re.split(r"[/\\]", rank["file"])[-1]


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
    return "memprof:" + ";".join(_field(field, clean) for field in text.removeprefix("memprof:").split(";"))


def _field(field: str, clean: Callable[[str], str]) -> str:
    name, equals, value = field.partition("=")
    return f"{name}={clean(value)}" if equals and name.isidentifier() else clean(field)


def _names_in(data: Any) -> set[str]:
    """Return the names of machines and users, and the secrets, that plain data gives away by where they stand."""
    found: set[str] = set()
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
            for key, inner in value.items():
                if isinstance(inner, str) and _NAMING_KEY.search(str(key)):
                    found |= {inner, inner.split(".")[0]}
                elif _private(str(key), inner):
                    told = inner.values() if isinstance(inner, dict) else [inner]
                    found.update(text for text in told if isinstance(text, str) and len(text) > 5)
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, str):
            found.update(_HOME.findall(value))
    return found


def _walk(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_key(str(k), clean): HIDDEN if _private(str(k), v) else _walk(v, clean) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_walk(item, clean) for item in value]
    return value


def _key(key: str, clean: Callable[[str], str]) -> str:
    """Clean a key; a field keeps its name, whatever a machine is called."""
    return key if key.isidentifier() and key.islower() and len(key) < 32 else clean(key)


def _private(key: str, value: Any) -> bool:
    """Tell whether a setting holds text under the name of a secret, or an environment; figures do not count."""
    key = _CAMEL.sub("_", key)
    kinds = (str, list, tuple, dict) if _ENVIRONMENT.fullmatch(key) else (str, list, tuple)
    return isinstance(value, kinds) and bool(_PRIVATE_KEY.search(key)) and not _INNOCENT_KEY.search(key)


def _setting_in_text(match: re.Match[str]) -> str:
    name, between, value = filter(None, match.groups())
    hidden = _private(name.replace("-", "_").replace(" ", "_"), value) and not value.isdecimal()
    return f"{name}{between}{HIDDEN if hidden else _SETTING.sub(_setting_in_text, value)}"


def _cleaner(told: Iterable[str] = ()) -> Callable[[str], str]:
    """Return what cleans a text; ``told`` are names to hide beside those of this machine and user."""
    names = _worth_hiding({*_own_names(), *told})
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(n)}(?!\w)" for n in names)) if names else None

    @lru_cache(maxsize=65536)  # stacks repeat their frames
    def clean(text: str) -> str:
        text = _SECRETS.sub(HIDDEN, text)
        text = _library_secrets().sub(HIDDEN, text)
        text = _SETTING.sub(_setting_in_text, text)
        text = _EMAIL.sub(HIDDEN, text)
        text = _URL.sub(rf"\1://{HIDDEN}", text)
        text = _ADDRESS.sub(HIDDEN, text)
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
