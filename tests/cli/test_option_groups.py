"""``--help`` shows every option once, under the group a reader looks in."""

from __future__ import annotations

import pytest
from click import Context

from memprof.cli import main
from memprof.cli.commands.plan import SEARCH
from memprof.cli.simulation_options import GROUPS

TITLES = {"simulate": [*GROUPS, "Output"], "plan": ["Required", *GROUPS, "Search", "Output"]}


@pytest.mark.parametrize("name", TITLES)
def test_every_option_is_shown_once_and_in_its_group(name: str) -> None:
    command = main.get_command(Context(main), name)
    assert command is not None
    group = main.make_context("memprof", [], resilient_parsing=True)  # click keeps the help option asked for first
    text = command.get_help(context := Context(command, info_name=name, parent=group))
    assert [line[:-1] for line in text.splitlines() if line.endswith(":") and line[:1] != " "] == TITLES[name]
    for option in command.get_params(context):
        if option.param_type_name == "option":
            flag = max(option.opts, key=len)
            assert sum(line.split()[:1] == [flag] or f", {flag} " in line for line in text.splitlines()) == 1, flag


def test_no_group_names_what_is_no_option() -> None:
    known = set()
    for name in TITLES:
        command = main.get_command(Context(main), name)
        assert command is not None
        known |= {parameter.name for parameter in command.params}
    assert {option for names in (*GROUPS.values(), SEARCH) for option in names.split()} <= known
