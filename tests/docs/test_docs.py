"""The documentation is checked against the code: every command and every configuration key has its place."""

from __future__ import annotations

import os
import re
import tomllib
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from tidemill.base.config.config import Config
from tidemill.cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(p.relative_to(ROOT)) for p in DOCS.rglob("*.md")),
]
TABS = ["Start", "Guides", "Concepts", "Reference", "Runbooks", "Internals"]


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


@cache
def prose(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, fragment) of each link to a file of the repository."""
    for target, fragment in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if "://" not in target:
            yield Path(os.path.normpath(page.parent / target)) if target else page, fragment


@cache
def anchors(page: Path) -> set[str]:
    """Return the ids of a page's headings, as the site makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]", "", title)).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def listed(nav: list[Any]) -> Iterator[str]:
    """Yield the pages of the navigation, depth first."""
    for item in nav:
        if isinstance(item, str):
            yield item
        else:
            for below in item.values():
                yield from listed(below if isinstance(below, list) else [below])


def navigation() -> list[dict[str, list[Any]]]:
    found: list[dict[str, list[Any]]] = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_has_a_section(command: str) -> None:
    assert f"## tidemill {command}\n" in (DOCS / "reference" / "commands.md").read_text()


@pytest.mark.parametrize("key", keys(Config))
def test_every_configuration_key_has_a_row(key: str) -> None:
    assert f"| `{key}` |" in (DOCS / "reference" / "configuration.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target, fragment in links(ROOT / page):
        assert target.exists(), f"{page} links to {target}"
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), f"{page} links to {target.name}#{fragment}"


def test_the_tabs_have_an_entry_page_each_and_list_every_page_once() -> None:
    tabs = navigation()
    assert [name for tab in tabs for name in tab] == TABS
    assert [tab[name][0] for tab, name in zip(tabs, TABS, strict=True)] == [f"{n.lower()}/index.md" for n in TABS]
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted([*listed(tabs), "index.md"]) == pages, "every page is in the navigation, the home page is not"


def test_every_page_can_be_reached_from_the_home_page_and_the_home_page_from_the_readme() -> None:
    assert DOCS / "index.md" in {target for target, _ in links(ROOT / "README.md")}
    reached, fresh = set(), {DOCS / "index.md"}
    while fresh:
        reached |= fresh
        fresh = {target for page in fresh if page.suffix == ".md" for target, _ in links(page)} - reached
    assert not {*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")} - reached


def test_every_verb_of_dev_is_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for verb in ("demo", "test", "check", "sim", "bench", "docs", "fmt", "lock"):
        assert f"./dev {verb} " in text
