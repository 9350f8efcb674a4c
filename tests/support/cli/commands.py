"""The commands without commands below them, by their full name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

from tidemill.cli.main import COMMANDS, load_command


def _commands() -> Iterator[tuple[str, Any]]:
    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(command, TyperGroup):
            yield name, command
            return
        for part, each in command.commands.items():
            yield from below(f"{name} {part}", each)

    for name in COMMANDS:
        yield from below(name, load_command(name))


EVERY = dict(_commands())
SHOWN = {name: each for name, each in EVERY.items() if not each.hidden and not COMMANDS[name.split()[0]].hidden}
"""The same commands without their earlier names."""
