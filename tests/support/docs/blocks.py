"""Blocks of a page, and the comparison of a command's output with the one that the page shows.

    ```LANGUAGE title="TITLE"      console: lines `$ COMMAND`, each followed by its output
    <!-- not run: REASON -->       in the line above a block: it needs something that a test does not have

In a shown output `…` is any text within a line, and a line `…` is any number of lines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

START = Path(__file__).parents[3] / "docs" / "start"
PAGES = ("install", "database", "live-page", "pipeline", "read", "stop")
"""Pages for new users, in the order of reading."""

_FENCE = re.compile(r'```(\w*)(?: title="(.*)")?')
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


class Block(NamedTuple):
    """One block. `line`: of its fence. `not_run`: the reason why it is only parsed, "" = it is run."""

    page: str
    line: int
    language: str
    title: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    """A command of a console block. `output`: the lines that the page shows."""

    line: str
    output: str


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence is not None:
            end = lines.index("```", at + 1)
            reason = _NOT_RUN.fullmatch(lines[at - 1])
            text = "\n".join(lines[at + 1 : end]) + "\n"
            found.append(Block(page.stem, at + 1, fence[1], fence[2] or "", text, reason[1] if reason else ""))
            at = end
        at += 1
    return found


def start_blocks() -> list[Block]:
    """Return the blocks of the pages for new users, in the order of reading."""
    return [block for page in PAGES for block in blocks_of(START / f"{page}.md")]


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a console block."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    return [Command(*part.partition("\n")[::2]) for part in parts[1:]]


def shows(expected: str, actual: str) -> bool:
    """Return whether an output is the one that a page shows. Spaces at the ends of lines do not count."""
    pattern = ""
    for line in expected.rstrip().splitlines():
        pattern += r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.rstrip().split("…"))) + r"\n"
    lines = [line.rstrip() for line in actual.rstrip().splitlines()]
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None
