"""Find the tests that start processes by reading their code.

A test counts when the code that it can reach starts one: its functions, its fixtures, and the helpers and classes of
this repository that these name. Product code is read only in the module that a test names: `Child` of the supervisor
counts because its own methods start a process. A start deeper in the product is invisible here; such a test needs the
marker `processes`, and `guard` detects its absence.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidemill

PRODUCT = str(Path(tidemill.__file__).parent) + "/"

STARTERS = {
    "subprocess", "Popen", "create_subprocess_exec", "create_subprocess_shell", "multiprocessing",
    "ProcessPoolExecutor", "fork", "forkpty", "posix_spawn", "posix_spawnp",
}  # fmt: skip
MARKERS = ("processes", "spark", "postgres", "node", "java", "go", "browser", "kcat")
"""A test with one of these starts a process, independently of its code."""


class Reader:
    """Remembers the code that it has read; one instance serves a whole collection. `root`: the repository whose files
    are read."""

    def __init__(self, root: Path) -> None:
        self._root, self._not_ours = f"{root}/", f"{root}/.venv/"
        self._starting: dict[types.CodeType | type, bool] = {}

    def starts(self, item: pytest.Item) -> bool:
        if any(item.get_closest_marker(name) for name in MARKERS):
            return True
        return any(self._reaches(function) for function in _functions(item))

    def _reaches(self, found: Any) -> bool:
        """Search depth first through the names of `found`. A cycle ends at a function that is being read: its other
        names decide."""
        key = found if isinstance(found, type) else found.__code__
        if key not in self._starting:
            self._starting[key] = False
            self._starting[key] = self._read(found)
        return self._starting[key]

    def _read(self, found: Any) -> bool:
        if isinstance(found, type):
            return any(self._reaches(function) for function in _methods(found))
        if not STARTERS.isdisjoint(_names(found.__code__)):
            return True
        product = found.__code__.co_filename.startswith(PRODUCT)
        return any(
            self._reaches(named) for named in self._named(found) if not product or named.__module__ == found.__module__
        )

    def _named(self, function: types.FunctionType) -> Iterator[Any]:
        """Return the functions and classes, of files that are read, that the function names or closes over."""
        names = _names(function.__code__)
        values: list[Any] = [function.__globals__[name] for name in names if name in function.__globals__]
        modules = [value for value in values if isinstance(value, types.ModuleType) and self._is_ours(value)]
        values += [vars(module)[name] for module in modules for name in names & vars(module).keys()]
        values += _closed_over(function)
        for value in values:
            if isinstance(value, types.FunctionType):
                value = inspect.unwrap(value)
            if isinstance(value, type | types.FunctionType) and self._is_ours(sys.modules.get(value.__module__)):
                yield value

    def _is_ours(self, module: types.ModuleType | None) -> bool:
        file = getattr(module, "__file__", None) or ""
        return file.startswith((self._root, PRODUCT)) and not file.startswith(self._not_ours)


def _functions(item: pytest.Item) -> Iterator[types.FunctionType]:
    """The test's own function, those of its fixtures, and the methods of its class except tests."""
    for method in _methods(getattr(item, "cls", None) or object):
        if not method.__name__.startswith("test"):
            yield method
    function = getattr(item, "function", None)
    info = getattr(item, "_fixtureinfo", None)
    fixtures = [one.func for defs in info.name2fixturedefs.values() for one in defs] if info else []
    for one in [function, *fixtures]:
        plain = inspect.unwrap(one) if callable(one) else None
        plain = getattr(plain, "__func__", plain)
        hypothesis = getattr(plain, "hypothesis", None)
        plain = getattr(hypothesis, "inner_test", plain)
        if isinstance(plain, types.FunctionType):
            yield plain


def _methods(owner: type) -> Iterator[types.FunctionType]:
    for base in owner.__mro__:
        for value in vars(base).values():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, types.FunctionType):
                yield value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return the function's code and that of all functions defined within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names(code: types.CodeType) -> set[str]:
    return {name for one in _codes(code) for name in one.co_names}


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a local name that was never bound
            yield cell.cell_contents
