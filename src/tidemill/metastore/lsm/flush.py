"""Flush: the rows in memory become one file of level 0.

Invariant (order): rows frozen together with their seqno → file durable → manifest written → version swapped and
rows dropped, in one step. Until that last step the rows stay readable in memory; if anything fails before it they
become ordinary layers again, and the next flush includes them.

One flush runs at a time, in its own task: a caller that times out does not stop it. Callers share flushes: each waits
for the first flush that covers what was applied when it called.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from itertools import repeat

from tidemill.base.errors import ClosedError, ConflictError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.lsm.database_protocol import DatabaseProtocol
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.memtable import Layer
from tidemill.metastore.lsm.merge_iterator import sort_layer
from tidemill.metastore.lsm.sst import SstWriter
from tidemill.metastore.lsm.version import Edit

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
"""Pause between failed flushes of a full buffer; it doubles from the first value to the maximum, with jitter."""


class Flusher:
    """Flush task. Owns the frozen part of the memtable. `error`: how the last flush failed, None if it succeeded."""

    def __init__(self, database: DatabaseProtocol) -> None:
        self._database = database
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._ended = False
        self.error: Exception | None = None
        self.flushes = 0
        self.file_bytes = 0
        self.longest_slice_rows = 0

    # callers ---------------------------------------------------------------------------------------

    async def flush(self, timeout_s: float | None) -> None:
        """Wait until everything applied before the call is persisted. Raises the error of a failed flush;
        UnavailableError after `timeout_s` seconds.
        """
        target = self._database.max_applied_seqno
        if self._database.max_persisted_seqno >= target:
            return
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (target, landed)
        self._waiters.append(waiter)
        self._database.wake.ring()
        try:
            async with asyncio.timeout(timeout_s):
                await landed
        except TimeoutError:
            if self._database.max_persisted_seqno >= target:
                return
            raise UnavailableError(
                "the flush did not end in time, it continues in the background: "
                f"timeout_s={timeout_s} target_seqno={target} persisted_seqno={self._database.max_persisted_seqno}.",
                fix="Wait longer, or find out why the object store is slow.",
            ) from self.error
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    @property
    def is_flush_requested(self) -> bool:
        database = self._database
        return bool(self._waiters) or database.memtable.live_bytes >= database.options.write_buffer_bytes

    # the task --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush when a caller waits or the buffer is full, until the database ends."""
        database = self._database
        retry_s = 0.0
        try:
            while database.lifecycle.end_reason is None:
                rings = database.wake.rings
                if not self.is_flush_requested:
                    await database.wake.wait_after(rings)
                    continue
                if retry_s and not self._waiters:
                    await self._back_off(retry_s)
                asked = list(self._waiters)
                try:
                    await self._flush_once()
                except Exception as error:
                    # Unexpected errors too: a bug in a flush must not leave its callers waiting.
                    self.error = error
                    retry_s = min(RETRY_MAX_S, max(RETRY_FIRST_S, 2 * retry_s))
                    self._resolve_waiters(asked, error)
                    database.wake.ring()
                else:
                    self.error = None
                    retry_s = 0.0
                    persisted = database.max_persisted_seqno
                    self._resolve_waiters([waiter for waiter in self._waiters if waiter[0] <= persisted], None)
                    # There is no batch without rows, so this flush covers everything applied before it.
                    assert not set(asked) & set(self._waiters)
        finally:
            self._resolve_waiters(
                self._waiters,
                database.lifecycle.end_reason or ClosedError("the flush was interrupted: the database is closing."),
            )

    async def _back_off(self, retry_s: float) -> None:
        """Back off, unless a caller arrives in the meantime."""
        wake = self._database.wake
        try:
            async with asyncio.timeout(retry_s * self._database.rand.uniform(0.5, 1.0)):
                rings = wake.rings
                while not self._waiters and self._database.lifecycle.end_reason is None:
                    rings = await wake.wait_after(rings)
        except TimeoutError:
            return

    def _resolve_waiters(self, waiters: list[tuple[int, asyncio.Future[None]]], error: Exception | None) -> None:
        for waiter in list(waiters):
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            _, landed = waiter
            if not landed.done():
                if error is None:
                    landed.set_result(None)
                else:
                    landed.set_exception(error)

    async def _flush_once(self) -> None:
        database = self._database
        # Invariant: a manifest's last_seqno never exceeds what its files hold. So no await between these two values.
        frozen, last_seqno = database.memtable.freeze(), database.max_applied_seqno
        if not frozen:
            return
        name = None
        try:
            writer = SstWriter(database.options)
            for layer in frozen:
                await sort_layer(layer)
                dated = layer.index_seqnos_step()
                while not dated:
                    await asyncio.sleep(0)
                    dated = layer.index_seqnos_step()
            for keys, values, seqnos in frozen_rows(frozen, database.options.slice_rows):
                self.longest_slice_rows = max(self.longest_slice_rows, len(keys))
                writer.add(keys, values, seqnos)
                await asyncio.sleep(0)
            buffers, summary = writer.finish()
            name = database.versions.next_file_name()
            try:
                await database.files.put(name, buffers)
            except (UnknownOutcomeError, ConflictError) as error:
                # No manifest names the file, so it does not matter whether it exists: the next attempt uses a new name.
                raise UnavailableError(f"a file may not have been stored: file={database.files.key(name)}.") from error
            file: FileMeta = summary.named(name.epoch, name.number, name.nonce)
            await database.commit_edit(Edit(((0, file),), (), last_seqno), database.memtable.drop_frozen)
            self.flushes += 1
            self.file_bytes += file.size_bytes
        except BaseException:
            database.memtable.thaw()
            raise
        finally:
            if name is not None:
                database.versions.release_file_names([name])


def frozen_rows(layers: tuple[Layer, ...], count: int) -> Iterator[tuple[list[bytes], list[bytes], list[int]]]:
    """Yield all rows of sorted layers (newest first) in key order, the newest of each key, about `count` at a time."""
    sorted_keys = [layer.sorted_keys or [] for layer in layers]
    if len(layers) == 1:
        values, seqnos = layers[0].values, layers[0].seqnos
        for at in range(0, len(sorted_keys[0]), count):
            keys = sorted_keys[0][at : at + count]
            yield keys, list(map(values.__getitem__, keys)), list(map(seqnos.__getitem__, keys))
        return
    places = [0] * len(layers)
    share = max(1, count // len(layers))
    while True:
        ends = [keys[at + share - 1] for keys, at in zip(sorted_keys, places, strict=True) if at + share < len(keys)]
        bound = min(ends, default=None)
        owner: dict[bytes, Layer] = {}
        for index in reversed(range(len(layers))):  # oldest first, so that a newer layer replaces an older one
            keys, start = sorted_keys[index], places[index]
            end = len(keys) if bound is None else bisect_right(keys, bound, start)
            places[index] = end
            owner.update(zip(keys[start:end], repeat(layers[index])))
        keys = sorted(owner)
        yield keys, [owner[key].values[key] for key in keys], [owner[key].seqnos[key] for key in keys]
        if bound is None:
            return
