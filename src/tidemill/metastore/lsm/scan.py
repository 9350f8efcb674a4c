"""Scans: an iterator of chunks over a view that stands still.

The view is taken and pinned when the scan is made, not when it is first awaited: rows put between the two
are not seen. The pins end with the last chunk, with `aclose`, or with the last reference to the scan.
"""

from __future__ import annotations

import asyncio
from typing import Self

from tidemill.metastore.lsm.merge_iterator import FilesRun, LayerRun, Rows, Run, take
from tidemill.metastore.lsm.pin import Pin

FILL_SHARE = 8
"""A run of a scan puts at most one in so many of the cache's bytes into it: long scans do not flush the cache."""

BLOCK_COST_FACTOR = 3
"""A decoded block takes about so many times its raw size."""

YIELD_SLICES = 16
"""The loop gets its turn after so many times `slice_rows` rows: some milliseconds."""


class Scan:
    """`async for keys, values in scan`: live rows in order, in two lists of equal length, never empty, the caller's."""

    def __init__(self, pin: Pin, lower: bytes, upper: bytes | None, reverse: bool) -> None:
        self._pin = pin
        self._reverse = reverse
        self._rows = 0
        view, options = pin.view, pin.options
        self._yield_rows = YIELD_SLICES * options.slice_rows
        fill_blocks = options.cache_bytes // (FILL_SHARE * BLOCK_COST_FACTOR * options.block_bytes)
        runs: list[Run] = []
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
        """Raise Missing, Corrupt, Invalid, Unavailable; after an error the scan is over."""
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
                    await _read(lacking)
                    continue
                keys, values = take(runs, self._reverse)
                for run in runs:
                    if run.done and run.start >= run.end:
                        # A new list: the loop above must not run over one that changes.
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
            self._close()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End early. Idempotent."""
        self._close()

    def _close(self) -> None:
        self._runs = []
        self._pin.release()

    def __del__(self) -> None:
        pin = getattr(self, "_pin", None)
        if pin is not None:
            pin.release()


async def _read(runs: list[Run]) -> None:
    if len(runs) == 1:
        await runs[0].read()
    else:
        await asyncio.gather(*(run.read() for run in runs))
