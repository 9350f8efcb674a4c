"""A captured server that dies, and its standby, which is promoted and reached at the same address.

cluster ─► proxy ─► primary ─► standby        cut: the standby receives no more, and the primary takes commits
cluster ─► proxy ─────────────► standby       over: the primary is killed, the standby promoted
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from support.capture.proxy import Proxy
from support.capture.standbys import copied_files, cut_off, promote, signalled
from support.lagging_standby import kill
from support.postgres import EmbeddedPostgres
from support.waiting import eventually

STANDBY = "oracle_standby"
SLOTS_SINCE = 17
"""First version with failover slots; before it a promoted standby has none."""


class Failover:
    def __init__(self, server: EmbeddedPostgres, directory: Path, stack: ExitStack) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True).start()
        stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
        self._proxy = self._run(Proxy(server.dsn).__aenter__())
        stack.callback(lambda: self._run(self._proxy.__aexit__()))
        self.dsn = self._proxy.dsn
        """Address of the captured database before and after the failover."""
        self.cut_lsn = 0
        """LSN of the cut: the standby has every commit below it and none above."""
        with psycopg.connect(server.dsn, autocommit=True) as control:
            self.slots = control.info.server_version // 10_000 >= SLOTS_SINCE
            control.execute("SELECT pg_create_physical_replication_slot(%s, true)", (STANDBY,))
        settings = {"sync_replication_slots": "on"} if self.slots else {}
        self._standby = copied_files(
            server, directory, STANDBY, hot_standby_feedback="on", primary_slot_name=STANDBY,
            primary_conninfo=f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres", **settings,
        )  # fmt: skip
        stack.enter_context(signalled(self._standby, "standby"))

    def _run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)

    def cut(self, slot: str) -> None:
        """Cut the standby off. It has every current commit, and the slot if the server synchronizes slots, and nothing
        later."""
        with (
            psycopg.connect(self._server.dsn, autocommit=True) as control,
            psycopg.connect(self._standby.dsn, autocommit=True) as there,
        ):
            (end, self.cut_lsn) = control.execute(
                "SELECT e, (e - '0/0')::bigint FROM pg_current_wal_lsn() e"
            ).fetchone() or ("", 0)

            def in_step() -> bool:
                if self.slots:  # what a slot needs to be synced: WAL that moves, and a snapshot of what runs
                    control.execute("SELECT pg_log_standby_snapshot()")
                query = (
                    "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn, EXISTS (SELECT FROM pg_replication_slots"
                    " WHERE slot_name = %s AND NOT temporary)"
                )
                return there.execute(query, (end, slot)).fetchone() == (True, self.slots)

            eventually(in_step, lambda: "the standby is not in step", 90)
        cut_off(self._standby)

    def over(self) -> str:
        """Kill the primary and promote the standby. Return the DSN of the new primary."""
        kill(self._server)
        promote(self._standby)

        async def lead() -> None:
            self._proxy.lead_to(self._standby.dsn)

        self._run(lead())
        return self._standby.dsn
