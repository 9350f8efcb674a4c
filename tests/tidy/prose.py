"""Rules for the prose of a Python tree. `python tests/tidy/prose.py PATH…` lists the lines that break them.

The rules read docstrings, comments, and the texts of raised errors. They find words of a former dialect, docstrings
that begin with a fragment instead of a verb or a noun phrase, sentences whose subject is a bare pronoun, lettered ids
in the place of names, references to documents outside the repository, names of errors without their ending, and error
texts that begin with a capital letter. The errors that a test file raises are stand-ins for those of a library or of a
caller; no user reads their texts.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DIALECT = re.compile(
    r"\b("
    r"anew|mend(?:s|ed|able|ing)?|whoever|nobody|somebody|beside|besides|told|tells|tell apart|lets? go|"
    r"letting go|goes on|go on|gone on|going on with|say so|says so|said of|taken in|takes? in|"
    r"comes? in(?:to force)?|so many|so long|lies|lie in|of its own|at once|is to be|are to be|is to go|"
    r"by itself|by then|once more|looked at|just now|for ever|stands? still|stood still|made of|"
    r"held (?:up|to)|given up|gives up|given back|cut off|of none|is (?-i:none)|are none|as it is|as they are|"
    r"as it was|meanwhile|whatever|whom|behind it|may it be|will not be had|come by|came by|let be|is had|"
    r"asked for ever|is over|is good|falls? due|makes? good|set aside|put aside|no wiser|wiser|dearest|"
    r"befalls?|unasked|betimes|thereby|wherein|hereby|thereof"
    r")\b",
    re.IGNORECASE,
)
"""Words of the former dialect. The list may grow, never shrink."""

FRAGMENTS = frozenset(
    [
        "Of",
        "As",
        "What",
        "Who",
        "Where",
        "How",
        "By",
        "From",
        "In",
        "Whether",
        "Which",
        "When",
        "With",
        "Under",
        "Behind",
        "Until",
        "Without",
        "Up",
        "For",
        "To",
        "Its",
        "Beside",
        "On",
        "At",
        "Those",
        "That",
        "So",
        "After",
        "Before",
        "Also",
        "None",
        "Not",
        "Nothing",
        "Nobody",
        "Whatever",
        "Whoever",
        "Whose",
        "Why",
        "Is",
        "Are",
        "It",
        "This",
        "They",
        "Ever",
        "Only",
        "Both",
        "Here",
        "There",
        "Then",
        "Between",
        "Against",
        "Among",
        "Than",
        "While",
        "Since",
        "Because",
        "If",
        "Unless",
        "Else",
        "More",
        "Less",
        "Most",
        "Such",
    ]
)
"""First words that make a docstring a fragment."""

PRONOUNS = re.compile(r"(?:^|[.!;]\s+|:\s+)(Who|Whoever|What|Whatever|Those that|Those who)\b(?![^.!?;]*\?)")
"""A sentence whose subject is a pronoun without an antecedent."""

LETTERED = re.compile(
    r"\(([A-Z]{1,3}\d{1,2})(?:[,;] ?[A-Z]{1,3}\d{1,2}|[a-z])*\)|^\s*([A-Z]{1,3}\d{1,2}) +[A-Z`a-z]", re.MULTILINE
)
TERMS = frozenset(
    [
        "L0",
        "L1",
        "L2",
        "L3",
        "L4",
        "L5",
        "L6",
        "S3",
        "F1",
        "V1",
        "V2",
        "V3",
        "C1",
        "K8",
        "P50",
        "P99",
        "H2",
        "RS256",
        "ES256",
        "HS256",
        "UTF8",
        "KIP1",
        "IPV4",
        "IPV6",
        "B1",
        "X86",
    ]
)
"""Letters with a digit that are terms of the field."""

CODE = re.compile(r"`[^`\n]*`")
"""Names of the code and of options, which prose quotes verbatim."""

ERRORS = re.compile(r"\b[Rr]aises?\b[^.]*?\b(Unavailable|Unknown|Corrupt|Closed|Missing|Invalid|Fenced|Conflict)\b")
"""Names of errors without `Error`, by which no class can be found."""

OUTSIDE = re.compile(r"\bnotes/|\bDESIGN\b|\bseeds? ?0\d\d\b|\bthe house\b|\bfield notes\b")
"""References to documents that are not in the repository. Seeds without a leading zero are those of the simulation."""

PROPER = frozenset(
    [
        "Kafka",
        "Spark",
        "Java",
        "Python",
        "Parquet",
        "Avro",
        "Protobuf",
        "Electric",
        "Debezium",
        "Delta",
        "Iceberg",
        "Postgres",
        "Confluent",
        "Unix",
        "Linux",
        "Arrow",
        "Polars",
        "Materialize",
        "Harbour",
        "Chromium",
        "Docker",
        "Windows",
        "Tidemill",
        "Unicode",
        "Gzip",
        "Snappy",
        "Zstandard",
        "Kubernetes",
        "Prometheus",
    ]
)


FOREIGN_TEXTS = frozenset({"RegistryError"})
"""Errors whose texts follow those of another product, which clients show or compare: the Confluent Schema Registry."""


class Finding(NamedTuple):
    """One line that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def sources_of(root: Path) -> list[Path]:
    """Return the Python files of a folder, without those that npm installed there, or the file that `root` is."""
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*.py") if "node_modules" not in path.parts)


def findings_of(path: Path) -> Iterator[Finding]:
    """Yield the findings of one Python file."""
    source = path.read_text()
    tree = ast.parse(source)
    is_test = path.name.startswith("test_")
    for node in ast.walk(tree):
        yield from _docstring(path, node)
        if isinstance(node, ast.Raise) and not is_test:
            yield from _error(path, node)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _text(path, token.start[0], token.string.lstrip("# "))


def _docstring(path: Path, node: ast.AST) -> Iterator[Finding]:
    is_scope = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
    for place, statement in enumerate(body):
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            continue
        value = statement.value.value
        if not isinstance(value, str):
            continue
        first = value.split(None, 1)[0].rstrip(":,.;") if value.split() else ""
        if first in FRAGMENTS and (place > 0 or is_scope):
            yield Finding(path, statement.lineno, "fragment", value.strip().splitlines()[0])
        yield from _text(path, statement.lineno, value)


def _text(path: Path, line: int, text: str) -> Iterator[Finding]:
    text = CODE.sub(lambda found: "`" * len(found[0]), text)
    for rule, pattern in (("dialect", DIALECT), ("subject", PRONOUNS), ("outside", OUTSIDE), ("error", ERRORS)):
        for match in pattern.finditer(text):
            yield Finding(path, line + text.count("\n", 0, match.start()), rule, match[0].strip(" .;:!\n"))
    for match in LETTERED.finditer(text):
        found = match[1] or match[2]
        if found not in TERMS:
            yield Finding(path, line + text.count("\n", 0, match.start() + 1), "lettered", found)


def _error(path: Path, node: ast.Raise) -> Iterator[Finding]:
    """Check the literal texts of a raised error, its first one for the capital letter."""
    if not (isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name | ast.Attribute)):
        return
    name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else node.exc.func.attr
    if not name.endswith("Error") or name in FOREIGN_TEXTS:
        return
    for text in (*node.exc.args, *(keyword.value for keyword in node.exc.keywords)):
        literal = text.values[0] if isinstance(text, ast.JoinedStr) and text.values else text
        if not (isinstance(literal, ast.Constant) and isinstance(literal.value, str)):
            continue
        yield from _text(path, text.lineno, literal.value)
        word = re.match(r"[A-Z][a-z]+\b(?![A-Z(.])", literal.value)
        if text in node.exc.args and word and word[0] not in PROPER:
            yield Finding(path, text.lineno, "capital", literal.value[:60])


def main() -> None:
    """Print the findings of the files and folders that are named, then their number by rule."""
    counts: dict[str, int] = {}
    for name in sys.argv[1:]:
        for path in sources_of(Path(name)):
            for finding in findings_of(path):
                print(finding)
                counts[finding.rule] = counts.get(finding.rule, 0) + 1
    print(counts)


if __name__ == "__main__":
    main()
