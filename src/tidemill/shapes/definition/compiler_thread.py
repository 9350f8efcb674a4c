"""Compiles where clauses on a thread of its own: parsing ten thousand nodes takes longer than the loop may stand still.

One thread, so that a flood of long clauses waits for itself, and for nothing that uses the common pool.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tidemill.base.runtime.tasks import is_fault
from tidemill.shapes.definition.planner import ShapeRequest, compile_request
from tidemill.shapes.definition.subset import Subset, SubsetRequest, SubsetScope, compile_subset
from tidemill.shapes.where import Type, Where


class CompileRequest(NamedTuple):
    """What is to be compiled: the arguments of `planner.compile_request`."""

    request: ShapeRequest
    types: Mapping[str, Type]
    schema: str
    table: str


class CompilerThread:
    """A `planner.Compiler`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shape-where")
        self._thread.submit(importlib.import_module, "postgast")  # a tenth of a second, ahead of the first clause

    async def __call__(self, request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str) -> Where | None:
        """Raises FieldError."""
        if not request.where and request.within is None:
            return compile_request(request, types, schema, table)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, compile_request, request, types, schema, table)

    async def many(self, asked: Sequence[CompileRequest]) -> list[Where | BaseException | None]:
        """Each one's clause, or what compiling it raised. Whoever asks for one meanwhile waits for all of them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, compile_each, asked)

    async def subset(self, request: SubsetRequest, scope: SubsetScope) -> Subset:
        """Raises FieldError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, compile_subset, request, scope)

    def close(self) -> None:
        """What runs ends by itself; nobody waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def compile_each(asked: Sequence[CompileRequest]) -> list[Where | BaseException | None]:
    found: list[Where | BaseException | None] = []
    for each in asked:
        try:
            found.append(compile_request(*each))
        except BaseException as error:
            if not is_fault(error):
                raise
            found.append(error)
    return found
