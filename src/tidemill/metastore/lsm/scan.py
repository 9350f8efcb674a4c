"""Scans: an iterator of chunks over a pinned view.

The view is taken and pinned when the scan is created, not when it is first awaited: rows written in between are not
seen. The pin is released with the last chunk, by `aclose`, or with the last reference to the scan.
"""

from __future__ import annotations

import asyncio
from typing import Self

from tidemill.metastore.lsm.merge_iterator import FilesRun, LayerRun, Rows, SortedRun, merge_next_rows
from tidemill.metastore.lsm.read_view import Pin

FILL_SHARE = 8
"""Each run of a scan fills at most 1/FILL_SHARE of the cache, so that long scans do not flush it."""

BLOCK_COST_FACTOR = 3
"""Approximate ratio of a decoded block's memory to its raw size."""

YIELD_SLICES = 16
"""Number of times `slice_rows` rows after which a scan yields to the event loop: some milliseconds."""


class Scan:
    """Iterator: `async for keys, values in scan`. Live rows in order, in two non-empty lists of equal length, which
    belong to the caller."""

    def __init__(self, pin: Pin, lower: bytes, upper: bytes | None, reverse: bool) -> None:
        self._pin = pin
        self._reverse = reverse
        self._rows = 0
        view, options = pin.view, pin.options
        self._yield_rows = YIELD_SLICES * options.slice_rows
        fill_blocks = options.cache_bytes // (FILL_SHARE * BLOCK_COST_FACTOR * options.block_bytes)
        runs: list[SortedRun] = []
        if upper is None or lower < upper:
            for files in view.version.runs(lower, upper):
                runs.append(FilesRun(view.tables, files, lower, upper, reverse, fill_blocks))
            runs.reverse()
            for layer in reversed(view.layers):
                if layer.values:
                    runs.append(LayerRun(layer, lower, upper, reverse))
        self._runs = runs  # oldest first
        if not runs:
            pin.release()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Rows:
        """Return the next chunk.

        Raises MissingError, CorruptError, InvalidError, UnavailableError; after an error the scan has ended.
        """
        runs = self._runs
        if not runs:
            raise StopAsyncIteration
        self._pin.check()
        try:
            while runs:
                lacking = []
                for run in runs:
                    while run.start >= run.end and not run.done:
                        if not run.refill():
                            lacking.append(run)
                            break
                if lacking:
                    await _read_runs(lacking)
                    continue
                keys, values = merge_next_rows(runs, self._reverse)
                for run in runs:
                    if run.done and run.start >= run.end:
                        # A new list: the loop above must not iterate over a list that changes.
                        self._runs = runs = [run for run in runs if not run.done or run.start < run.end]
                        break
                if not runs:
                    self._pin.release()
                self._rows += len(keys) or 1
                if self._rows >= self._yield_rows:
                    self._rows = 0
                    await asyncio.sleep(0)
                if keys:
                    return keys, values
        except BaseException:
            self._release()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the scan early. Idempotent."""
        self._release()

    def _release(self) -> None:
        self._runs = []
        self._pin.release()

    def __del__(self) -> None:
        pin = getattr(self, "_pin", None)
        if pin is not None:
            pin.release()


async def _read_runs(runs: list[SortedRun]) -> None:
    if len(runs) == 1:
        await runs[0].read()
    else:
        await asyncio.gather(*(run.read() for run in runs))
