"""A primary and its derivatives: standbys that follow until they are disconnected, and copies of its files."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg

from support.postgres import EmbeddedPostgres, find_binaries
from support.waiting import eventually

SETTINGS: Mapping[str, str] = {
    "fsync": "off",
    "shared_buffers": "16MB",
    "max_wal_size": "256MB",
    "wal_level": "logical",
}


@contextmanager
def primary(directory: Path, **settings: str) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(directory / "primary", settings={**SETTINGS, **settings}) as server:
        yield server


def copied_files(server: EmbeddedPostgres, directory: Path, name: str, **settings: str) -> EmbeddedPostgres:
    """A base backup of a running server, not started yet. It has none of the server's slots."""
    made = EmbeddedPostgres(directory / name, settings={**SETTINGS, **settings}, binaries=server._binaries)
    made.data_dir.mkdir(mode=0o700)
    made._own(made.data_dir)
    subprocess.run(
        made._command(
            find_binaries() / "pg_basebackup", "-D", str(made.data_dir), "-h", "127.0.0.1", "-p", str(server.port),
            "-U", "postgres", "-X", "stream", "-c", "fast", "--no-sync",
        ),
        check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
    )  # fmt: skip
    (made.data_dir / "postmaster.pid").unlink(missing_ok=True)
    return made


def signalled(server: EmbeddedPostgres, name: str) -> EmbeddedPostgres:
    """`standby` or `recovery`."""
    signal = server.data_dir / f"{name}.signal"
    signal.touch(mode=0o600)
    server._own(signal)
    return server


@contextmanager
def standby(server: EmbeddedPostgres, directory: Path, name: str, **settings: str) -> Iterator[EmbeddedPostgres]:
    """Start a standby that follows by a physical slot of its name, and syncs failover slots if that is set."""
    with psycopg.connect(server.dsn, autocommit=True) as control:
        control.execute(f"SELECT pg_create_physical_replication_slot('{name}', true)")
        made = copied_files(
            server, directory, name, hot_standby_feedback="on", primary_slot_name=name,
            primary_conninfo=f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres", **settings,
        )  # fmt: skip
        try:
            with signalled(made, "standby"):
                yield made
        finally:
            control.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = '{name}' AND active_pid IS NOT NULL"
            )


def cut_off(server: EmbeddedPostgres) -> None:
    """Returns once the standby follows no more."""
    with psycopg.connect(server.dsn, autocommit=True) as control:
        control.execute("ALTER SYSTEM SET primary_conninfo = ''")
        control.execute("SELECT pg_reload_conf()")
        follows = "SELECT 1 FROM pg_stat_wal_receiver WHERE pid IS NOT NULL"
        eventually(lambda: not control.execute(follows).fetchone(), "the standby still follows")


def promote(server: EmbeddedPostgres) -> None:
    """Returns once it takes writes."""
    with psycopg.connect(server.dsn, autocommit=True) as control:
        assert control.execute("SELECT pg_promote(true, 60)").fetchone() == (True,)
