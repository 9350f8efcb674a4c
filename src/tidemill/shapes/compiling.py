"""Compiles where clauses on a thread of its own: parsing ten thousand nodes takes longer than the loop may stand still.

One thread, so that a flood of long clauses waits for itself, and for nothing that uses the common pool.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tidemill.shapes.plan import ShapeRequest, compile_request
from tidemill.shapes.where import Type, Where


class CompilerThread:
    """A `plan.Compiler`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shape-where")
        self._thread.submit(importlib.import_module, "postgast")  # a tenth of a second, ahead of the first clause

    async def __call__(self, request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str) -> Where | None:
        """Raises FieldError."""
        if not request.where:
            return compile_request(request, types, schema, table)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, compile_request, request, types, schema, table)

    def close(self) -> None:
        """What runs ends by itself; nobody waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
