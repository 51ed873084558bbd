"""The table of rules: every example decides as its rule says, and a bad table is refused in one sentence."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import numpy as np
import pytest

from memprof.attribution import facts
from memprof.attribution.facts import inferred
from memprof.attribution.rules import PhaseRule, Rule, file_test, load_rules, package_names
from memprof.attribution.stack_index import StackIndex
from memprof.errors import InputError
from memprof.frame_paths import FramePath
from memprof.snapshot import Frame, StackTable
from memprof.vocabulary import Category, Evidence, Phase

RULES = load_rules()


def table(*stacks: list[str]) -> StackTable:
    """Interned stacks of ``file:line function`` texts; ``stacks[0]`` is empty as in a snapshot."""
    ids: dict[Frame, int] = {}
    out: list[tuple[int, ...]] = [()]
    for stack in stacks:
        row = []
        for text in stack:
            place, _, function = text.partition(" ")
            file, _, line = place.rpartition(":")
            row.append(ids.setdefault(Frame(file, int(line), function), len(ids)))
        out.append(tuple(row))
    return StackTable(list(ids), out)


def decided(stack: list[str], phase: str = "other", tier: str = "specific", rules: object = RULES) -> str | None:
    """The name of the rule that decides a stack."""
    index = StackIndex(table(stack), rules)  # type: ignore[arg-type]
    code = next(p.code for p in Phase if p.value == phase)
    found = int(index.first_rule(tier, np.array([1]), np.array([code]))[0])
    return index.rules.rules[found].name if found >= 0 else None


def phase_of(stack: list[str]) -> str | None:
    """The phase rule that decides a stack."""
    found = int(StackIndex(table(stack), RULES).phase_rule()[1])
    return RULES.phases[found].name if found >= 0 else None


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda r: r.name)
def test_example_is_decided_by_its_rule(rule: Rule) -> None:
    assert rule.example
    assert rule.comment
    assert decided(list(rule.example), rule.example_phase, rule.tier) == rule.name


@pytest.mark.parametrize("rule", RULES.phases, ids=lambda r: r.name)
def test_example_is_in_its_phase(rule: PhaseRule) -> None:
    assert rule.example
    assert rule.comment
    assert phase_of(list(rule.example)) == rule.name


@pytest.mark.parametrize("rule", [r for r in RULES.rules if r.tier == "specific"], ids=lambda r: r.name)
def test_cpp_frames_and_windows_paths_change_nothing(rule: Rule) -> None:
    mixed = []
    for text in rule.example:
        mixed += ["??:0 _ZN3c104cuda20CUDACachingAllocator", "/usr/include/c10/core/x.h:3 c10::TensorImpl::foo(long)"]
        if not text.startswith((":", "/")):
            text = "C:\\Python\\Lib\\site-packages\\" + text.replace("/", "\\")
        mixed.append(text)
    assert decided(mixed, rule.example_phase) == rule.name


def test_an_ordinary_stack_matches_no_specific_rule() -> None:
    assert decided(["torch/nn/functional.py:2445 silu", "model.py:40 forward", "train.py:5 main"], "forward") is None


def test_the_innermost_phase_decides() -> None:
    generation = "transformers/generation/utils.py:3007 generate"
    evaluation = "transformers/trainer.py:4400 evaluation_loop"
    assert phase_of([generation, evaluation]) == "generation"
    logps, loss = (
        "trl/trainer/grpo_trainer.py:1495 _get_per_token_logps",
        "trl/trainer/grpo_trainer.py:3000 compute_loss",
    )
    assert phase_of([logps, loss]) == "training.forward"
    assert phase_of(["my_trainer.py:9 ref_log_probs", "train.py:3 main"]) == "logprobs.reference"
    assert phase_of([]) is None


@pytest.mark.parametrize(
    ("called", "caller", "holds"),
    [("a.py:1 inner", "b.py:1 outer", True), ("b.py:1 outer", "a.py:1 inner", False)],
)
def test_inside_wants_an_order(tmp_path: Path, called: str, caller: str, holds: bool) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[[rule]]\nname = "mine"\ncategory = "inputs"\ninside = ["a.py:inner", "b.py:outer"]\n')
    assert (decided([called, caller], rules=load_rules(own)) == "mine") is holds


def test_own_rules_come_first_and_replace(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '[[rule]]\nname = "vllm.engine"\ncategory = "inputs"\nany = ["nothing.py:none"]\n'
        '[[rule]]\nname = "mine"\ncategory = "communication"\nany = ["torch/optim/*:_init_group"]\n'
    )
    rules = load_rules(own)
    engine = list(RULES.rule("vllm.engine").example)
    assert decided(list(RULES.rule("torch.optimizer-state").example), "optimizer_step", rules=rules) == "mine"
    assert decided(engine, "load", rules=rules) != "vllm.engine"
    assert decided(engine, "load") == "vllm.engine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rule]\n", "not valid TOML"),
        ("[[rule]]\ncategory = 'inputs'\n", "needs a name"),
        ("[[rule]]\nname = 'x'\ncategory = 'nonsense'\nany = ['a:b']\n", "'nonsense'"),
        ("[[rule]]\nname = 'x'\ncategory = 'inputs'\n", "no condition"),
        ("[[rule]]\nname = 'x'\ncategory = 'inputs'\nany = ['generate']\n", "FILE:FUNCTION"),
        ("[[rule]]\nname = 'x'\ncategory = 'inputs'\nany = 'a:b'\n", "list of strings"),
        ("[[rule]]\nname = 'x'\ncategory = 'inputs'\nanny = ['a:b']\n", "unknown key 'anny'"),
        ("[[rule]]\nname = 'x'\ncategory = 'inputs'\ninside = ['a:b']\n", "two patterns"),
        ("[[rule]]\nname = 'x'\ncategory = 'inputs'\nphases = ['lunch']\n", "'lunch'"),
        ("[[phase]]\nname = 'x'\nphase = 'generate'\n", "frames or outermost"),
        ("[[phase]]\nname = 'x'\nphase = 'generate'\nrank = 'high'\nframes = ['a:b']\n", "rank"),
        ("rule = 3\n", "[[rule]]"),
        ("[rules]\n", "unknown table 'rules'"),
        ("schema = 'memprof.rules/9'\n", "not supported"),
        ("[frames]\nwheels = ['a:b']\n", "[frames]"),
        (
            "[[rule]]\nname='x'\ncategory='inputs'\nany=['a:b']\n[[phase]]\nname='x'\nphase='load'\nframes=['a:b']\n",
            "twice",
        ),
    ],
)
def test_a_bad_table_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(InputError) as caught:
        load_rules(own)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_table_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Cannot read the rules file"):
        load_rules(tmp_path / "absent.toml")


def test_simple_globs_match_what_their_regular_expressions_match() -> None:
    """Most need none; fnmatch's own is the oracle."""
    globs = ["a.py", "*.py", "a*", "*b/a*", "x/a.py", "torch/nn/*", "torch/optim/a.py", "x/*/a.py", "x/*", "a?.py", "*"]
    inner = ["", "a.py", "b/a.py", "x/a.py", "q/x/a.py", "x/", "ax.py", "torch/nn/a.py", "torch/optim/a.py", "x/b/a.py"]
    for glob in globs:
        rooted, named = glob.partition("/")[0] in package_names(), "/" not in glob
        match = re.compile(fnmatch.translate(glob)).match
        below = re.compile("(?:.*/)?" + fnmatch.translate(glob), re.DOTALL).match
        test = file_test(glob)
        for path in [*inner, *(p + "\nz" for p in inner)]:
            for root in (True, False):
                expected = match(path.rpartition("/")[2]) if named else root and match(path) if rooted else below(path)
                assert test(FramePath(path, root)) == bool(expected), (glob, path, root)


@pytest.mark.parametrize("rule", inferred())
def test_an_inferred_rule_is_whole_and_used(rule: str) -> None:
    stages = "".join(path.read_text() for path in Path(facts.__file__).parent.glob("*.py"))
    for category, said in inferred()[rule].items():
        assert f'Category.{Category(category).name}, "{rule}")' in stages
        assert set(said) <= {"evidence", "detail", "alternatives"}
        assert Evidence(said["evidence"]) is not Evidence.NONE
        assert Category(category) not in [Category(other) for other in said.get("alternatives", ())]
