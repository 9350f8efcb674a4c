"""A captured table t under DDL: capture in a process that tests kill, pipelines in this one, the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
from typer.testing import CliRunner

from support.waiting import eventually
from tidemill.base.errors import TidemillError
from tidemill.cli.main import build_application

PROGRAM = Path(__file__).parents[1] / "capture" / "process.py"


class Ground:
    """`again`: parked tables are copied again by themselves."""

    def __init__(self, dsn: str, harbour: Any, directory: Path, *, again: bool = False) -> None:
        self.dsn = dsn
        self.name = dsn.rpartition("/")[2]
        self._harbour = harbour
        self._directory = directory
        self._again = ["again"] if again else []
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "tidemill.toml").write_text(
            f'[node]\nname = "n"\ndata = "{directory}"\n'
            f'[objects]\nurl = "file://{directory}/objects"\n[consensus]\nurl = "sqlite://{directory}/consensus.db"\n'
            f'[capture.{self.name}]\ndsn = "{dsn}"\n'
        )

    def __enter__(self) -> Ground:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        waiting = threading.Event()
        mine = f"FROM pg_replication_slots WHERE slot_name = 'tidemill_{self.name}'"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for _ in range(100):
                connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {mine} AND active_pid IS NULL")
                if not connection.execute(f"SELECT {mine}").fetchall():
                    break
                waiting.wait(0.1)

    def start(self) -> None:
        arguments = [sys.executable, str(PROGRAM), self.dsn, self.name, str(self._directory), *self._again]
        log = (self._directory / "capture.log").open("ab")
        self._process = subprocess.Popen(arguments, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pipeline(self, shard: str) -> str:
        return f'def build(p):\n    p.table("{shard}", p.capture("{self.name}").table("t"))\n'

    def sql(self, *statements: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def selected(self) -> list[dict[str, Any]]:
        with psycopg.connect(self.dsn, row_factory=psycopg.rows.dict_row) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            rows = connection.execute("SELECT * FROM t").fetchall()
        return sorted(rows, key=lambda row: str(row["id"]))

    def contents(self, shard: str, as_of: int | None = None) -> list[dict[str, Any]]:
        if not self._harbour.upper(shard):
            return []
        rows = self._harbour.contents(shard, as_of)
        return sorted(rows, key=lambda row: str(row["id"]))

    def row(self) -> Any:
        stores = self._harbour.stores
        return self._harbour.portal.call(stores.catalogue.table(self.name, "public.t"))

    def parked(self) -> Any:
        return eventually(lambda: (row := self.row()) is not None and row.state == "parked" and row)

    def command(self, *arguments: str) -> tuple[int, Any]:
        """Return the exit code and the JSON of the last line (None without one)."""
        done = CliRunner().invoke(build_application(), [*arguments, "-c", str(self._directory / "tidemill.toml")])
        if isinstance(done.exception, TidemillError):
            return 2, str(done.exception)
        line = (done.stdout.splitlines() or [""])[-1]
        return done.exit_code, json.loads(line) if line.startswith(("{", "[")) else done.output
