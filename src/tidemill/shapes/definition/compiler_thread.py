"""Compiles where clauses on a separate thread: parsing ten thousand nodes would block the event loop for too long.

There is one thread, so that a flood of long clauses delays only itself, and nothing that uses the common pool.
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
    """The arguments of `planner.compile_request`."""

    request: ShapeRequest
    types: Mapping[str, Type]
    schema: str
    table: str


class CompilerThread:
    """A `planner.Compiler`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shape-where")
        self._thread.submit(importlib.import_module, "postgast")  # takes 0.1 s; done before the first clause

    async def __call__(self, request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str) -> Where | None:
        """Compile the clause of a request, None if it has none. Raises FieldError."""
        if not request.where and request.within is None:
            return compile_request(request, types, schema, table)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, compile_request, request, types, schema, table)

    async def compile_many(self, asked: Sequence[CompileRequest]) -> list[Where | BaseException | None]:
        """Compile many clauses in one job; return each clause or the exception that it raised. Other requests wait for
        the job."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, compile_all, asked)

    async def compile_subset(self, request: SubsetRequest, scope: SubsetScope) -> Subset:
        """Compile a subset. Raises FieldError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, compile_subset, request, scope)

    def close(self) -> None:
        """Stop without waiting for a running job."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def compile_all(asked: Sequence[CompileRequest]) -> list[Where | BaseException | None]:
    found: list[Where | BaseException | None] = []
    for each in asked:
        try:
            found.append(compile_request(*each))
        except BaseException as error:
            if not is_fault(error):
                raise
            found.append(error)
    return found
