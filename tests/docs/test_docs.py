"""The documentation is checked against the code: every command and every configuration key has its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from tidemill.base.config.config import Config
from tidemill.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]


def commands() -> list[str]:
    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return sorted(name for name, command in found.items() if not command.hidden)


def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        arguments = getattr(inner, "__args__", ())
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += keys(inner, f"{prefix}{name}.")
        elif arguments and isinstance(arguments[-1], type) and issubclass(arguments[-1], BaseModel):
            found += keys(arguments[-1], f"{prefix}{name}.<name>.")
        else:
            found.append(prefix + name)
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_has_a_section(command: str) -> None:
    assert f"## tidemill {command}\n" in (ROOT / "docs" / "commands.md").read_text()


@pytest.mark.parametrize("key", keys(Config))
def test_every_configuration_key_has_a_row(key: str) -> None:
    assert f"| `{key}` |" in (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"


def test_every_verb_of_dev_is_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for verb in ("demo", "test", "check", "sim", "bench", "docs", "fmt", "lock"):
        assert f"./dev {verb} " in text
