"""A primary and a standby that replicates asynchronously, unless `require_standby` is called.

Once disconnected and promoted, it has lost what it did not receive.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg

from support.postgres import EmbeddedPostgres, find_binaries
from support.waiting import eventually

SETTINGS = {"fsync": "off", "shared_buffers": "16MB", "max_connections": "100", "wal_keep_size": "64MB"}
PATIENCE_S = 60.0


class Pair:
    """Two servers that accept connections; `url` names both, and leads to the writable one."""

    def __init__(self, directory: Path) -> None:
        self.primary = EmbeddedPostgres(directory / "primary", settings=SETTINGS).start()
        copy = directory / "standby"
        binary = find_binaries() / "pg_basebackup"
        subprocess.run(
            [binary, "-D", copy, "-X", "stream", "-c", "fast", "--no-sync", "-d", self.primary.dsn], check=True
        )
        self._standby_settings = {**SETTINGS, "primary_conninfo": self.primary.dsn}
        (copy / "standby.signal").touch()
        self.standby = EmbeddedPostgres(copy, settings=self._standby_settings)
        if os.geteuid() == 0:
            assert self.standby._uid is not None
            for path in (copy, *copy.rglob("*")):
                os.chown(path, self.standby._uid, self.standby._uid, follow_symlinks=False)
        self.standby.start()

    @property
    def url(self) -> str:
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"

    def caught_up(self) -> None:
        """Wait until the standby has everything that is committed now."""
        with psycopg.connect(self.primary.dsn, autocommit=True) as connection:
            [end] = connection.execute("SELECT pg_current_wal_lsn()").fetchone() or ("",)
        until(self.standby.dsn, f"SELECT pg_last_wal_replay_lsn() >= '{end}'::pg_lsn")

    def require_standby(self) -> None:
        """Make commits on the primary wait for the standby from here on."""
        with psycopg.connect(self.primary.dsn, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        until(self.primary.dsn, "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")

    def rejoin(self) -> None:
        """Replicate again, after `cut_off`."""
        with psycopg.connect(self.standby.dsn, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET primary_conninfo = '{self.primary.dsn}'")
            connection.execute("SELECT pg_reload_conf()")

    def cut_off(self) -> None:
        """Stop replication: from here on the standby receives nothing."""
        with psycopg.connect(self.standby.dsn, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
        until(self.standby.dsn, "SELECT count(*) = 0 FROM pg_stat_wal_receiver")

    def fail_over(self) -> None:
        """The primary dies without a word, and the standby is promoted with what it has."""
        kill(self.primary)
        with psycopg.connect(self.standby.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_promote(true)")

    def close(self) -> None:
        for server in (self.primary, self.standby):
            if server.running:
                kill(server)


def kill(server: EmbeddedPostgres) -> None:
    """SIGKILL of every process of the server, so that none finishes a commit."""
    pid = server.pid
    assert pid is not None
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    for each in (pid, *map(int, listed)):
        try:
            os.kill(each, 9)
        except ProcessLookupError:
            continue
    assert server._process is not None
    server._process.wait(PATIENCE_S)


def until(dsn: str, question: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        eventually(lambda: (connection.execute(question).fetchone() or (False,))[0], question, pause_s=0.05)


if __name__ == "__main__":
    print(Pair(Path(sys.argv[1])).url)
