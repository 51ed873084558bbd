"""Every declared target is in the installed packages; each one taken out is refused or noted, in a sentence."""

from __future__ import annotations

import inspect
import re

import pytest

from memprof.compat import missing, require
from memprof.compat.check import TARGETS, fault_of, spoken
from memprof.compat.features import FEATURES
from memprof.compat.signatures import declared, parameters_of
from memprof.compat.targets import ASSIGNED, KEY, LOCAL, READ, REPLACED, Target
from memprof.compat.versions import installed, is_installed
from memprof.errors import UsageError
from tests.compat.removal import remove, stop_using

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytest.importorskip("peft")

_ON_CUDA = bool(torch.version.cuda or torch.version.hip)
# DeepSpeed, bitsandbytes and Liger are not test dependencies; test_check.py tries a package that is not installed.
HERE = [t for t in TARGETS if is_installed(t.package) and (t.build != "cuda" or _ON_CUDA)]
NEEDED = [t for t in HERE if t.needed_by]
OPTIONAL = [t for t in HERE if t.optional_for]
_IDS = {"ids": lambda target: f"{target.module}:{target.path}" if isinstance(target, Target) else str(target)}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What only watches looks at nothing that has not been imported."""
    for target in HERE:
        target.find()


@pytest.mark.parametrize("target", HERE, **_IDS)
def test_is_in_the_installed_package(target: Target) -> None:
    assert fault_of(target) is None


def test_every_target_is_declared_in_full() -> None:
    for target in TARGETS:
        assert target.needed_by or target.optional_for, target
        assert {*target.needed_by, *target.optional_for} <= set(FEATURES), target
        assert bool(target.consequence) == bool(target.optional_for), f"a consequence is what a note says: {target}"
        assert not set(target.needed_by) & set(target.optional_for), target
        assert target.how != ASSIGNED or "." in target.path, target
        assert target.how != READ or target.signature is None, target
        assert target.how != REPLACED or target.signature is not None, target


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_can_be_entered(feature: str) -> None:
    require(feature)
    assert missing(feature) == []


@pytest.mark.parametrize("target", NEEDED, **_IDS)
def test_a_needed_target_that_is_gone_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(target, monkeypatch)
    version = re.escape(f"the {spoken(target.package)} that is installed, {installed(target.package)}")
    for feature in target.needed_by:
        with pytest.raises(UsageError, match=rf"^{re.escape(FEATURES[feature].title)}\b.*{version}.*\.$") as refused:
            require(feature)
        assert refused.value.exit_code == 2
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("feature", [name for name, feature in FEATURES.items() if feature.includes])
def test_a_feature_needs_what_those_it_includes_need(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FEATURES[feature].includes[-1]
    remove(next(t for t in NEEDED if inner in t.needed_by and feature not in t.needed_by), monkeypatch)
    with pytest.raises(UsageError, match=f"^{FEATURES[feature].title} "):
        require(feature)


@pytest.mark.parametrize("target", [t for t in NEEDED if t.how == KEY], **_IDS)
def test_a_key_that_has_another_name_is_refused_by_its_name(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for it finds nothing, and nothing has a meaning: that would be a wrong result and no error."""
    remove(target, monkeypatch)
    for feature in target.needed_by:
        with pytest.raises(UsageError, match=rf"{re.escape(target.user[1])} does not use '{target.name}' in the "):
            require(feature)


@pytest.mark.parametrize("target", OPTIONAL, **_IDS)
def test_an_optional_target_that_is_gone_is_noted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(target, monkeypatch)
    words = target.consequence[:1].upper() + target.consequence[1:]
    for feature in target.optional_for:
        notes = missing(feature)
        said = f"{target.user[1]} does not use {target.name!r}" if target.how == KEY else f"{target.path} is not"
        assert any(note.startswith(f"{words}: {said} in the ") for note in notes), notes


@pytest.mark.parametrize("target", [t for t in HERE if t.used_in and t.how not in (LOCAL, KEY)], **_IDS)
def test_a_target_nobody_uses_any_more_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still there, but replacing it would change nothing: as bad as one that is gone."""
    stop_using(target, monkeypatch)
    for feature in target.needed_by:
        with pytest.raises(UsageError, match=rf"{re.escape(target.user[1])} does not use {target.name} in the "):
            require(feature)


def _claims(target: Target) -> bool:
    """Whether a declaration says anything of arguments that Python code can be asked about."""
    if target.signature is None or target.path.startswith("ops."):  # test_check.py compares an operator's
        return False
    named = declared(target.signature)
    return bool(named.positional or named.keywords) and parameters_of(target.get()) is not None


@pytest.mark.parametrize("target", [t for t in HERE if _claims(t)], **_IDS)
def test_a_target_with_other_arguments_is_refused_or_noted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*, something_new: object) -> None: ...

    thing = target.get()
    if isinstance(thing, type):
        monkeypatch.setattr(thing, "__signature__", inspect.signature(other), raising=False)
    else:
        owner, name = target.place()
        monkeypatch.setattr(owner, name, other)
    for feature in target.needed_by:
        with pytest.raises(UsageError, match=re.escape(target.path)):
            require(feature)
    for feature in target.optional_for:
        assert any(f"{target.path}(" in note for note in missing(feature))


@pytest.mark.parametrize(("used_in", "found"), [("json:load or dump", "load"), ("json:absent or dump", "dump")])
def test_of_two_users_the_newer_is_asked_where_it_is_there(used_in: str, found: str) -> None:
    assert Target("json", "loads", used_in=used_in).user == ("json", found)
