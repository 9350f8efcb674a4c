"""Prose of the product, tools, tests and pages: docstrings, comments, error texts are plain technical English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from prose import CODE, DIALECT, findings_of, sources_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tidemill"
PRODUCT = (SOURCE, ROOT / "demo")
TOOLS = (ROOT / "benchmarks", ROOT / "tests" / "sim", ROOT / "tests" / "support")
TESTS = tuple(path for path in sorted((ROOT / "tests").glob("[!_.]*")) if path.name not in ("sim", "support", "tidy"))
"""Not the tests of the rules, which plant what the rules find."""
PAGES = sorted(
    page
    for folder, pattern in ((ROOT, "*.md"), (ROOT / "docs", "**/*.md"))
    for page in folder.glob(pattern)
    if page.name != "vocabulary.md" and page.parent.name != "rfcs"
)
"""Pages to check: the vocabulary is excluded because it lists the words to avoid, the RFCs because they are records."""
ROOMS: dict[Path, list[Path]] = {}
"""Files by folder: one case for each folder, since a case of its own for each file costs more than the check."""
for file in sorted(path for root in (*PRODUCT, *TOOLS, *TESTS) for path in sources_of(root)):
    ROOMS.setdefault(file.parent, []).append(file)

ALLOWED = {
    ("cli/serve.py", "No module named '"),  # Python's own text
    ("shapes/definition/planner.py", "The following columns are not found on the table: "),  # Electric's
    ("shapes/definition/planner.py", "The list of columns must include all primary key columns, mi"),
    ("shapes/http/authorization.py", "Unauthorized - Invalid API secret"),
    ("shapes/where/sql_tree.py", "At location "),
    ("spark/decode/row_decoder.py", "Object has other fields"),  # msgspec's, in the reasons of dead letters
}
"""Texts that follow those of another product."""

CONTROL_FLOW = frozenset({"Stall"})
"""Exceptions that are no errors: the control flow of one module."""


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT))


@pytest.mark.parametrize("folder", ROOMS, ids=relative)
def test_prose_is_plain(folder: Path) -> None:
    found = [str(f) for path in ROOMS[folder] for f in findings_of(path) if (relative(path), f.text) not in ALLOWED]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_are_plain(page: Path) -> None:
    text = CODE.sub("", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    assert not DIALECT.findall(text)


CONSTANT = re.compile(r"\b[A-Z][A-Z0-9]+_[A-Z0-9_]+\b")
FOREIGN_CONSTANTS = {
    *("SO_REUSEPORT", "UIO_MAXIOV", "RLIMIT_CPU", "RLIMIT_AS", "PG_UNICODE_FAST"),  # names of other systems
    *("START_MS", "PARENT_PID", "FOOTER_CRC", "MAX_LENGTH", "SHOP_DSN"),  # parts of a syntax that the prose describes
}


def test_constants_that_prose_names_exist() -> None:
    known, named = set(FOREIGN_CONSTANTS), {}
    for path in SOURCE.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            found = CONSTANT.findall(token.string)
            if token.type == tokenize.COMMENT or token.string.lstrip("r").startswith('"""'):
                named |= dict.fromkeys(found, relative(path))
            else:
                known.update(found)
    assert not {name: path for name, path in named.items() if name not in known}


def test_errors_end_in_error() -> None:
    wrong = []
    for path in (path for folder in PRODUCT for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.endswith("Error"):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                if any(base.endswith(("Error", "Exception")) for base in bases) and node.name not in CONTROL_FLOW:
                    wrong.append(f"{relative(path)}: {node.name}({', '.join(bases)})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('''"""Of `rows`, ever."""''', "fragment"),
        ('''"""Return it. Whoever asks is told."""''', "dialect"),
        ('''"""Return it. What is left goes to the caller."""''', "subject"),
        ('''"""Return it, once it is durable (K1)."""''', "lettered"),
        ('''"""Return it, as notes/kafka.md says."""''', "outside"),
        ('''"""Return it, as seed 002 demands."""''', "outside"),
        ("""raise InvalidError("The name is wrong.")""", "capital"),
        ("""x = 1  # it is made anew""", "dialect"),
        ('''"""Read it. Raises MissingError, Unavailable."""''', "error"),
    ],
)
def test_a_planted_sentence_is_found(tmp_path: Path, source: str, rule: str) -> None:
    (tmp_path / "planted.py").write_text(source)
    assert rule in {finding.rule for finding in findings_of(tmp_path / "planted.py")}


def test_errors_that_a_test_file_raises_and_seeds_of_the_simulation_are_allowed(tmp_path: Path) -> None:
    source = '''"""Found by the simulation, seed 341."""\nraise InvalidError("The name is wrong.")'''
    (tmp_path / "test_planted.py").write_text(source)
    (tmp_path / "planted.py").write_text(source)
    assert [finding.rule for finding in findings_of(tmp_path / "test_planted.py")] == []
    assert [finding.rule for finding in findings_of(tmp_path / "planted.py")] == ["capital"]
