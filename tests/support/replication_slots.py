"""Replication slots that tests leave on a server that they share."""

from __future__ import annotations

import time

import psycopg


def drop_slots(dsn: str) -> None:
    mine = "FROM pg_replication_slots WHERE database = current_database()"
    try:
        with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as connection:
            until_s = time.monotonic() + 5
            while connection.execute(f"SELECT slot_name {mine}").fetchall() and time.monotonic() < until_s:
                connection.execute(f"SELECT pg_terminate_backend(active_pid) {mine} AND active_pid IS NOT NULL")
                connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {mine} AND active_pid IS NULL")
    except psycopg.Error:
        return  # the test did away with its database, or with the server
