"""No function assigns to the name of a function that it calls: the call would fail, and a fallback may hide that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def shadowed_calls(source: str) -> list[tuple[str, int]]:
    """Return (name, line) of each call of a module-level function by a name that the caller assigns to."""
    tree = ast.parse(source)
    known = {n.name for n in tree.body if isinstance(n, Function | ast.ClassDef)}
    known |= {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    found = []
    for function in ast.walk(tree):
        if isinstance(function, Function):
            own = [*_own_nodes(function)]
            assigned = {n.id for n in own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            calls = [n.func for n in own if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
            found += [(call.id, call.lineno) for call in calls if call.id in assigned & known]
    return found


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of nested ones."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)


def test_a_call_of_a_shadowed_function_is_found() -> None:
    planted = "def sizes(x): ...\ndef f(keys):\n    first, sizes = sizes(keys), 1\n    return first\n"
    assert shadowed_calls(planted) == [("sizes", 3)]
    assert not shadowed_calls(planted.replace("first, sizes =", "first, found ="))


def test_no_call_is_shadowed() -> None:
    found = {path.name: calls for path in SOURCE.rglob("*.py") if (calls := shadowed_calls(path.read_text()))}
    assert not found
