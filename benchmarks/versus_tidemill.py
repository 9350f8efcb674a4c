"""tidemill in `./dev bench versus`: one `tidemill up` with a captured database and a pipeline of eight tables."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psycopg
import pyarrow as pa

import tidemill
import versus_processes
from support.ports import free_port
from tidemill.base.limits import PIPELINE_FRESHNESS_MS
from versus_processes import command
from versus_stack import FILES, HERE, TABLES, Keeper, configuration_lines

ROLES = {"bin/java": "jvm", "tidemill.cli.serve": "node", "tidemill.spark.pipeline.driver": "driver"}


class Tidemill:
    def __init__(self, home: Path, dsn: str, freshness_s: float) -> None:
        self.name = "tidemill"
        self.keeper = Keeper(home / "logs")
        self._home, self._dsn = home, dsn
        port = psycopg.conninfo.conninfo_to_dict(dsn)["port"]
        first = free_port(2)
        tables = ", ".join(f'"public.{table}"' for table in TABLES)
        self._config = home / "tidemill.toml"
        # A longer freshness is one for the whole way: the capture gathers for a tenth of it.
        pace = f"\nlinger_ms = {freshness_s * 100:.0f}" if freshness_s > PIPELINE_FRESHNESS_MS / 1000 else ""
        self._config.write_text(
            (FILES / "tidemill.toml")
            .read_text()
            .format(
                home=home, http=first, kafka=first + 1, postgres=port, tables=tables, freshness_s=freshness_s,
                pace=pace, pipeline=FILES / "pipeline.py",
            )
        )  # fmt: skip
        self.reader = [sys.executable, str(HERE / "versus_reader.py"), "tidemill", str(self._config)]

    def start(self) -> None:
        self.keeper.start("supervisor", [sys.executable, "-m", "tidemill", "up", "--config", str(self._config)])

    def stop(self) -> None:
        self.keeper.stop()

    def wait_drained(self, limit_s: float) -> None:
        """Wait until each table has a time that began after the call. Raises TimeoutError."""
        called_ms = time.time() * 1000
        until_s = time.monotonic() + limit_s
        with tidemill.connect(self._config) as cluster:
            for table in TABLES:
                while cluster.table(table).frontiers().upper <= called_ms:
                    if time.monotonic() > until_s:
                        raise TimeoutError(f"a table did not advance: table={table} limit_s={limit_s:g}")
                    time.sleep(0.1)

    def contents(self) -> dict[str, pa.Table]:
        with tidemill.connect(self._config) as cluster:
            return {table: cluster.table(table).to_arrow() for table in TABLES}

    def disk_mib(self) -> dict[str, int]:
        return {"data": versus_processes.disk_mib(self._home / "data")}

    def lines(self) -> dict[str, int]:
        return {
            "tidemill.toml": configuration_lines(self._config.read_text()),
            "pipeline.py": configuration_lines((FILES / "pipeline.py").read_text()),
        }

    def role(self, pid: int, parent: str) -> str:
        """Return the role of a child; workers are what the JVM starts."""
        if parent in ("jvm", "workers"):
            return "workers"
        line = command(pid)
        return next((role for part, role in ROLES.items() if part in line), "")
