"""The pages for new users: few commands, and what is only parsed. `tests/e2e/test_start_pages.py` executes the rest."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import postgast
import pytest

from support.docs.blocks import PAGES, START, Block, commands_of, shows, start_blocks

BLOCKS = start_blocks()
MOST_COMMANDS = 12


def test_every_page_has_blocks_and_few_commands() -> None:
    assert {block.page for block in BLOCKS} == {page.stem for page in START.glob("*.md")} - {"index", "demo"}
    run = [block for block in BLOCKS if not block.not_run]
    count = sum(len(commands_of(block)) if block.language == "console" else block.language == "sql" for block in run)
    assert count <= MOST_COMMANDS
    assert sum(block.language == "console" for block in run if block.page == PAGES[0]) == 1


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=str)
def test_a_block_that_is_not_run_is_parsed(block: Block, tmp_path: Path) -> None:
    if block.language == "sql":
        postgast.parse(block.text)
    elif block.language == "console":
        assert commands_of(block) and all(shlex.split(command.line) for command in commands_of(block))
    elif block.language == "text":
        statements = re.findall(r"^  ([A-Z][^;]*;)$", block.text, re.MULTILINE)
        assert statements
        for statement in statements:
            postgast.parse(statement)
    else:
        assert block.language in ("js", "jsx")
        node = shutil.which("node")
        if node is None:
            pytest.skip("Node.js is not installed")
        # Without its elements, JSX is JavaScript: Node.js checks the rest of the module.
        text = block.text.replace("<p>…</p>", "null")
        if block.language == "jsx":
            text = text[: text.index("<ul>")] + "null;\n}\n"
        (tmp_path / "block.mjs").write_text(text)
        done = subprocess.run([node, "--check", str(tmp_path / "block.mjs")], capture_output=True, text=True)
        assert done.returncode == 0, json.dumps(done.stderr)


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("a\n", "a  \n\n", True),
        ("a …\n", "a b c\n", True),
        ("a …\n", "a b\nc\n", False),
        ("…\n", "", True),
        ("a\n…\nz\n", "a\nb\nc\nz\n", True),
        ("a\n…\nz\n", "a\nz\nb\n", False),
        ("a.b\n", "axb\n", False),
        ("", "a\n", False),
    ],
)
def test_an_output_is_compared_with_the_one_shown(expected: str, actual: str, same: bool) -> None:
    assert shows(expected, actual) is same
