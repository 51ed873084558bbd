"""A misspelt command or card is answered with the name that was meant."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from memprof.cli.group import main
from memprof.config.gpus import find_gpu
from memprof.errors import UsageError


@pytest.mark.parametrize(("typed", "meant"), [("reprot", "report"), ("simluate", "simulate"), ("plann", "plan")])
def test_a_command_like_one_is_named(typed: str, meant: str) -> None:
    done = CliRunner().invoke(main, [typed, "x"])
    assert done.exit_code == 2
    assert f"Did you mean '{meant}'?" in done.output


def test_nothing_is_guessed_of_what_is_like_no_command() -> None:
    done = CliRunner().invoke(main, ["zzzz"])
    assert done.exit_code == 2
    assert "Did you mean" not in done.output


def test_a_card_like_one_is_named() -> None:
    with pytest.raises(UsageError, match=r"did you mean RTX 4090"):
        find_gpu("RTX4009")
