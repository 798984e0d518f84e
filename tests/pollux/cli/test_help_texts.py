"""What ``--help`` shows: all of every option's text, and its default, whatever marks they hold."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from pollux.cli import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))


EVERY = dict(commands(get_command(app)))


@pytest.mark.parametrize("path", list(EVERY), ids=" ".join)
def test_no_word_of_an_options_text_is_swallowed(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert shown.exit_code == 0
    text = " ".join(shown.output.replace("│", " ").split())
    for option in EVERY[path].params:
        words = [str(getattr(option, "help", None) or "")]
        if isinstance(default := getattr(option, "show_default", None), str):
            words.append(f"[default: ({default})]")
        for each in words:
            assert " ".join(each.split()) in text, (option.name, each)
