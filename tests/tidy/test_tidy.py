"""The mechanical rules of STYLE.md as tests."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tidemill"
ROOMS = sorted(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists())
FILES = sorted([*SOURCE.rglob("*.py"), *(ROOT / "demo").rglob("*.py")])
SIMULATION = ROOT / "tests" / "sim"
SIMULATED = [p for p in sorted(SIMULATION.rglob("*.py")) if not p.name.startswith("test_")]
"""Files of the simulation in which a seed decides everything, so that the product's rules apply to them, too."""
RULED = [*FILES, *SIMULATED]
"""Files that the rules of the product hold for. One case checks all: a case for each file and rule took a minute."""
MAX_LINES = 500
MAX_LINES_SIMULATION = 600
"""The simulation is a test, and not layered like the product."""
MAX_FILES = 13
"""Limit of the modules of a folder, plus the one that describes it."""
LARGE_FOLDERS = {f"src/tidemill/{name}" for name in ("kafka/handlers", "metastore/rows", "metastore/lsm")}
"""Folders with one module per API key or row family, and the LSM, which is one algorithm."""
SMALL_LINES = 60
SMALL_FILES_MAX = 39
"""Limit of the modules of the product below SMALL_LINES, which are usually part of another. About half are handlers."""
PARAMETERS_MAX = 7
LONG_SIGNATURES_MAX = 9
"""Limit of the functions of the product with more than PARAMETERS_MAX parameters besides `self` and `cls`."""
METHODS_MAX = 25

RAW_CALLS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "monotonic"),
    ("time", "clock_gettime"),
    ("time", "sleep"),
    ("uuid", "uuid4"),
    ("random", "random"),
    ("random", "randint"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("os", "urandom"),
}
CLOCK_HOME = SOURCE / "base" / "clock.py"
TASK_HOMES = {SOURCE / "base" / "runtime" / "tasks.py", SIMULATION / "loop.py", SIMULATION / "world.py"}
"""Modules that may create tasks. The simulation creates the loop itself, and tasks in the context of an actor that can
die."""
PURE_NAMES = {"apply.py", "state.py", "commands.py", "flush_tracker.py", "operator.py"}
IMPURE_IMPORTS = {"asyncio", "time", "random", "structlog", "logging", "socket", "threading", "os"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(tree: ast.AST) -> list[tuple[str, str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            found.append((name, node.func.attr, node.lineno))
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once for all rules, without the garbage collector, which would visit every kept tree again."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def test_clock_and_randomness_are_passed_in() -> None:
    raw = [
        f"{relative(path)}:{line}: {owner}.{name}"
        for path in RULED
        if path != CLOCK_HOME
        for owner, name, line in calls(tree_of(path))
        if (owner, name) in RAW_CALLS
    ]
    assert not raw, f"pass Clock or Rand in instead: {raw}"


def test_no_bare_tasks() -> None:
    bare = [
        f"{relative(path)}:{line}"
        for path in RULED
        if path not in TASK_HOMES
        for _, name, line in calls(tree_of(path))
        if name in ("create_task", "ensure_future")
    ]
    assert not bare, f"spawn through base.runtime.tasks.Tasks: {bare}"


def test_text_has_an_encoding_that_does_not_depend_on_the_locale() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in [*FILES, *(ROOT / "docs").rglob("*.py")]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and uses_encoding_of_the_locale(node)
    ]
    assert not found, f'pass encoding="utf-8": {found}'


def uses_encoding_of_the_locale(call: ast.Call) -> bool:
    """Return whether a call reads or writes text without naming its encoding. `x.open()` is taken for no file."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    opens = name in ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile")
    of_path = name == "open" and isinstance(call.func, ast.Attribute)
    position = 0 if of_path or name.endswith("TemporaryFile") else 1
    mode = given.get("mode", call.args[position] if opens and len(call.args) > position else None)
    text_mode = isinstance(mode, ast.Constant) and re.fullmatch("[rwaxt+]+", str(mode.value)) is not None
    return "encoding" not in given and (
        name in ("read_text", "write_text")
        or (opens and (text_mode or (mode is None and position == 1)))
        or not {"text", "universal_newlines"}.isdisjoint(given)
    )


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.read_text(errors='replace')", True),
        ("path.write_text(text)", True),
        ("path.open('a')", True),
        ("open(path)", True),
        ("os.fdopen(number, 'w')", True),
        ("NamedTemporaryFile('w')", True),
        ("subprocess.run(command, text=True)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("path.open('rb')", False),
        ("open(path, mode='wb')", False),
        ("NamedTemporaryFile()", False),
        ("domain.open(context)", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("subprocess.run(command)", False),
    ],
)
def test_text_without_an_encoding_is_found(code: str, found: bool) -> None:
    (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    assert uses_encoding_of_the_locale(call) is found


def test_files_stay_readable() -> None:
    long = []
    for path in RULED:
        lines = path.read_text().count("\n")
        if lines > (MAX_LINES_SIMULATION if path.is_relative_to(SIMULATION) else MAX_LINES):
            long.append(f"{relative(path)} has {lines} lines")
    assert not long, f"split by reason: {long}"


def test_folders_stay_readable() -> None:
    count = Counter(path.parent.relative_to(ROOT).as_posix() for path in FILES)
    large = {folder: files for folder, files in count.items() if files > MAX_FILES and folder not in LARGE_FOLDERS}
    assert not large, f"make a folder for each stage of the flow: {large}"


def test_few_modules_are_small() -> None:
    modules = [path for path in FILES if path.is_relative_to(SOURCE) and path.name != "__init__.py"]
    small = [relative(path) for path in modules if path.read_text().count("\n") < SMALL_LINES]
    assert len(small) <= SMALL_FILES_MAX, f"{len(small)} modules are small, merge one into what it serves: {small}"


def test_few_functions_take_many_parameters() -> None:
    long = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in FILES
        if path.is_relative_to(SOURCE)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameter_count(node.args) > PARAMETERS_MAX
    ]
    assert len(long) <= LONG_SIGNATURES_MAX, f"group parameters that travel together: {long}"


def parameter_count(arguments: ast.arguments) -> int:
    """Return the number of parameters besides `self` and `cls`."""
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    own = bool(found) and found[0].arg in ("self", "cls")
    return len(found) - own + (arguments.vararg is not None) + (arguments.kwarg is not None)


def test_classes_stay_readable() -> None:
    large = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body) > METHODS_MAX
    ]
    assert not large, f"split off a part with its own state and invariant: {large}"


@pytest.mark.parametrize("path", [p for p in FILES if p.name in PURE_NAMES], ids=relative)
def test_pure_modules_import_nothing_that_waits_or_knows_the_time(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert not imported & IMPURE_IMPORTS, f"{relative(path)} imports {sorted(imported & IMPURE_IMPORTS)}"


def test_no_exception_is_swallowed() -> None:
    swallowed = [
        f"{relative(path)}:{node.lineno}"
        for path in RULED
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and is_bare(node) and [type(step) for step in node.body] == [ast.Pass]
    ]
    assert not swallowed, f"handle or report each error: {swallowed}"


def is_bare(handler: ast.ExceptHandler) -> bool:
    kind = handler.type
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_what_it_owns(room: str) -> None:
    text = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())) or ""
    assert text.startswith(f"{room}") and len(text) > 80, f"{room}/__init__.py: say what the room owns and what not"


def test_no_index_address_and_no_private_path_is_committed() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    hosts = ("files.pytho" + "nhosted", "pypi." + "org", "registry." + "npmjs")
    for name in filter(None, files):
        path = ROOT / name
        if path.suffix in (".png", ".gif", ".ico") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        assert not [host for host in hosts if host in text], f"{name} names a registry host"


def test_no_mark_of_a_conflict_is_committed() -> None:
    found = subprocess.run(
        ["git", "grep", "-lE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, f"resolve what a merge left in {found.stdout.split()}"


TEST_FILES = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "node_modules" not in path.parts)
TEST_MODULES = {path.stem for path in TEST_FILES}


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_no_file_imports_a_test_file(folder: str) -> None:
    found = [
        f"{relative(path)} imports {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "node_modules" not in path.parts
        for module in imports_of(path)
        if module.rpartition(".")[2] in TEST_MODULES
    ]
    assert not found, f"move what they share to tests/support: {found}"


@functools.cache
def imports_of(path: Path) -> set[str]:
    return imported_modules(ast.parse(path.read_text()))


def imported_modules(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_demo_imports_nothing_of_the_tests_and_only_its_own_tests_import_it() -> None:
    names = {path.name for path in (ROOT / "tests").iterdir()}
    for path in sorted((ROOT / "demo").rglob("*.py")):
        packages = {module.partition(".")[0] for module in imports_of(path)}
        assert not packages & {*names, "tests"}, f"{relative(path)} imports a helper of the tests"
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "node_modules" not in path.parts and path.parent.name != "e2e":
            packages = {module.partition(".")[0] for module in imports_of(path)}
            assert "demo" not in packages, f"{relative(path)} imports the demo: use tests/support"


def test_an_import_of_a_test_file_is_found() -> None:
    name = min(TEST_MODULES)
    for line in (f"import {name}", f"from {name} import World", f"from tests.base import {name}"):
        assert {module.rpartition(".")[2] for module in imported_modules(ast.parse(line))} & TEST_MODULES == {name}
