"""The control connection of a session and those who share it: heartbeat, slot watch, table watch.

It also carries the capture's advisory lock, so when it breaks, the session must end; the watchers see to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from tidemill.base.errors import Invalid, Unavailable
from tidemill.capture.config import CaptureConfig
from tidemill.capture.setup import SlotState, check_slot, heartbeat, published_tables, slot_state
from tidemill.capture.tables import TableInfo, list_tables, resolve
from tidemill.capture.wire.connection import Wire

log = structlog.get_logger()

SLOT_POLL_S = 1.0

T = TypeVar("T")


class Control:
    """One question at a time on one connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = asyncio.Lock()

    async def ask(self, question: Callable[[Wire], Awaitable[T]]) -> T:
        async with self._lock:
            return await question(self._wire)

    async def aclose(self) -> None:
        await self._wire.aclose()


async def keep_beating(control: Control, config: CaptureConfig, last_commit_lsn: Callable[[], int]) -> None:
    """One heartbeat at the start, so that the snapshot's LSN is crossed; then one whenever no commit came for
    heartbeat_s."""
    await control.ask(heartbeat)
    while True:
        before = last_commit_lsn()
        await asyncio.sleep(config.heartbeat_s)
        if last_commit_lsn() == before:
            await control.ask(heartbeat)


async def watch_slot(control: Control, config: CaptureConfig, on_state: Callable[[SlotState], None]) -> None:
    """The server's side of the story: retained WAL, WAL end. Raises SlotLost as soon as it is."""
    while True:
        state = await control.ask(lambda wire: slot_state(wire, config.slot))
        on_state(check_slot(config, state))
        await asyncio.sleep(SLOT_POLL_S)


async def watch_tables(control: Control, config: CaptureConfig, captured: Sequence[TableInfo]) -> None:
    """Raises Unavailable for a table made anew, unpublished, or new under a pattern: the next session takes it in."""
    names = {table.name for table in captured}
    warned = ""
    while True:
        await asyncio.sleep(config.table_poll_s)
        published = await control.ask(lambda wire: published_tables(wire, config.publication)) or set()
        tables = await control.ask(list_tables)
        oids = {table.name: table.oid for table in tables}
        for table in captured:
            if table.name in oids and (oids[table.name] != table.oid or table.name not in published):
                raise Unavailable(f"a captured table was made anew or unpublished: table={table.name}.")
        try:
            added = {table.name for table in resolve(config.tables, tables)} - names
        except Invalid as error:
            # What runs goes on; the next start will refuse it.
            if warned != error.message:
                log.warning("a table cannot be captured", capture=config.name, cause=str(error))
                warned = error.message
            continue
        if added:
            raise Unavailable(f"new tables match the capture: tables={','.join(sorted(added))}.")
