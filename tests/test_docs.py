"""The documentation: links lead somewhere, commands run, Python compiles, the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click import Context

from memprof.cli import main
from tests.documentation import ROOT, SHELLS, Block, blocks_of, commands_in, documented_pages, memprof_commands
from tests.workspace import Workspace

OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/measurements.md")
PAGES = [*(ROOT / name for name in OTHERS), *documented_pages()]
BLOCKS = [block for page in documented_pages() for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language in SHELLS]
PYTHON = [block for block in BLOCKS if block.language in ("python", "py")]

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)
TABLE_COMMAND = re.compile(r"`(memprof [a-z]+[^`|]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for link, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page.parent / link if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings, as the site and code hosts make them."""
    return {anchor_of(heading) for heading in HEADING.findall(page.read_text(encoding="utf-8"))}


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_marks_are_understood_and_give_a_reason(block: Block) -> None:
    assert not block.unknown_marks
    assert block.language or not any(memprof_commands(line) for line in block.text.splitlines()), "name the language"


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_have_the_options_they_are_given(block: Block) -> None:
    calls = [call for line in (*block.commands, *own_commands(block)) for call in memprof_commands(line)]
    for name, *words in calls:
        if not name.startswith("-"):
            assert_options(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_within_sentences_exist(page: Path) -> None:
    for command in TABLE_COMMAND.findall(page.read_text(encoding="utf-8")):
        for name, *words in memprof_commands(command):
            assert_options(name, words)


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in main.list_commands(Context(main)) if f"memprof {name}" not in text] == []


def assert_options(name: str, words: list[str]) -> None:
    command = main.get_command(Context(main), name)
    assert command is not None, f"no command memprof {name}"
    if name == "run":
        return  # what follows the script is the script's
    words = words[: words.index("--")] if "--" in words else words
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    flags = {word.split("=")[0].strip("[]") for word in words if re.match(r"\[?--?[a-z]", word)}
    # In prose an option may stand for two: --a/--no-a, --flash|efficient.
    assert {flag.split("/")[0].split("|")[0] for flag in flags} <= known | {"--help", "-h"}, f"memprof {name} {words}"


def own_commands(block: Block) -> list[str]:
    return commands_in(block.text)


@pytest.mark.parametrize("block", [b for b in SHELL if b.commands != own_commands(b)], ids=str)
def test_what_is_run_instead_runs_the_same_commands(block: Block) -> None:
    shown = {call[0] for line in own_commands(block) for call in memprof_commands(line)}
    assert shown <= {call[0] for line in block.commands for call in memprof_commands(line)}


# -- running them ----------------------------------------------------------------------------------------------------


RUN = [pytest.param(b, marks=[pytest.mark.heavy] if b.heavy else [], id=str(b)) for b in SHELL if not b.not_run]


@pytest.mark.parametrize("block", RUN)
def test_commands_run(block: Block, workspace: Workspace) -> None:
    for command in block.commands:
        done = workspace.run(command)
        assert done.returncode == block.exit_code, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [block for block in PYTHON if block.runs], ids=str)
def test_python_runs(block: Block, workspace: Workspace) -> None:
    done = workspace.python(block.text)
    assert done.returncode == 0, done.stderr


# -- the site --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.stem != "index"]
    assert all((site / page.stem / "index.html").is_file() for page in pages)


def test_the_navigation_has_every_page() -> None:
    from mkdocs.utils import yaml_load

    with (ROOT / "mkdocs.yml").open(encoding="utf-8") as file:
        navigation = str(yaml_load(file)["nav"])
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in navigation] == []


def test_the_index_leads_to_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "index.md"]
    assert [name for name in pages if f"({name}" not in text] == []


#: What users ask: the link of the index that answers, and words of the answer there.
ANSWERS = {
    "Why does nvidia-smi show more than the report?": ("faq.md", "for the whole device every process on it"),
    "What does fits include?": ("simulating.md#does-it-fit", "(600 MiB unless it was recorded)"),
    "How far off is a prediction?": ("accuracy.md#predictions", "**One run of TRL on a GPU was compared"),
    "Does it change my run?": ("recording.md#what-it-costs", "the same to the bit"),
    "How much does recording cost?": ("recording.md#what-it-costs", "what it costs on a GPU is not measured"),
    "Which TRL versions?": ("recording.md#what-it-works-with", "TRL 0.19 to 1.16"),
    "Accelerate, FSDP, DeepSpeed?": ("recording.md#what-it-works-with", "DeepSpeed's attributes on stand-ins"),
    "vLLM in the same process?": ("recording.md#what-it-works-with", "vLLM 0.32 in TRL's process, on a CPU"),
    "verl?": ("frameworks.md", "| verl 0.9, OpenRLHF 0.11, NeMo-RL, slime, AReaL 1.0 | | | from source |"),
    "How do I switch it off?": ("recording.md", "`MEMPROF=0` in the environment"),
    "Is anything sent anywhere?": ("privacy.md", "memprof has no telemetry"),
    "How do I share a report without secrets?": ("reading-a-report.md#sharing", "Redaction is pattern-based"),
    "May I open a stranger's pickle?": ("snapshot-format.md#safety", "Nothing is imported or called"),
    "What has never run on a GPU?": ("accuracy.md#what-never-ran-on-a-gpu", "have never run on a GPU:"),
    "What does the lean trainer refuse?": ("lean-trainer.md#limitations", "**Uses TRL's own step**"),
    "What does the lean trainer cost?": ("lean-trainer.md#memory-use", "**The cost is slower generation**"),
    "Is it the same training?": ("lean-trainer.md#how-it-is-known-to-be-the-same", "than 1e-5 of its norm in fp32"),
    "Which GPUs are known by name?": ("simulating.md#does-it-fit", "from a T4 to a B300"),
    "Which models?": ("models.md", "`qwen3_moe`"),
    "SFT and DPO?": ("simulating.md#rloo-sft-and-dpo", "`plan` supports neither"),
    "What share for vLLM on the trainer's GPU?": ("simulating.md#vllm-on-the-trainers-gpu", "--serve-beside"),
    "Does LoRA of a 7B fit in 24 GB?": ("simulating.md#what-is-the-most-that-fits", "LoRA + ch… fits 18.98"),
    "What does Liger save?": ("faq.md#what-does-liger-save", "TRL 1.16 (`trl`): 0.25 of 5.17 GiB"),
    "How do I contribute?": ("../CONTRIBUTING.md", "make test"),
    "Many GPUs?": ("many-gpus.md", "**no collective, no barrier**"),
    "Can a pull request fail on memory?": ("ci.md", "if the allocated peak grew by more than 2%"),
    "What is unattributed?": ("faq.md#why-does-the-page-say-unattributed", "No evidence explains"),
    "Which exit codes?": ("reading-a-report.md#exit-codes", "| 4 | it does not fit"),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_the_index_leads_to_the_answer(question: str) -> None:
    link, answer = ANSWERS[question]
    name, _, anchor = link.partition("#")
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    if anchor:
        sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
        text = next(part for part in sections if anchor_of(part.partition("\n")[0][3:]) == anchor)
    assert f"({link})" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert answer in " ".join(text.split())


def test_pages_ask_the_network_for_nothing_but_links(site: Path) -> None:
    """No font, script, style or picture comes from elsewhere."""
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"|<link[^>]+stylesheet[^>]+href="(https?:[^"]+)"'
    )
    found = {m.group() for page in site.rglob("*.html") for m in fetched.finditer(page.read_text(encoding="utf-8"))}
    assert not found
