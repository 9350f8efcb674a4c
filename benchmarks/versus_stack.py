"""A stack of `./dev bench versus`: the interface that both sides have, and the processes of one, which a keeper
restarts by the same command as an init system would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

import versus_processes

HERE = Path(__file__).parent
FILES = HERE / "versus"
TABLES = ("warehouse", "district", "customer", "stock", "orders", "order_line", "payment", "probe")
STOP_S = 60.0
START_S = 600.0
RESTART_S = 1.0


class Stack(Protocol):
    name: str
    keeper: Keeper
    reader: list[str]
    """Command that prints a line of JSON for each row of the table `probe`: its id, and when it was seen."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def wait_drained(self, limit_s: float) -> None: ...
    def contents(self) -> dict[str, pa.Table]: ...
    def disk_mib(self) -> dict[str, int]: ...
    def lines(self) -> dict[str, int]: ...
    def role(self, pid: int, parent: str) -> str: ...


class Keeper:
    """Processes by role, each with a log. A process that ends is restarted after a second."""

    def __init__(self, logs: Path) -> None:
        self.restarts: dict[str, int] = {}
        self._logs = logs
        self._commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, role: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._commands[role] = command, {**os.environ, **(environ or {})}
        self._launch(role)

    def keep(self) -> None:
        """Restart processes that end, from now on."""
        self._watcher.start()

    def roots(self) -> dict[int, str]:
        return {process.pid: role for role, process in self._processes.items()}

    def check(self) -> None:
        """Raise RuntimeError if a process ended that is not restarted."""
        if self._watcher.is_alive():
            return
        for role, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"a process ended: role={role} code={process.returncode} log={self.tail(role)}")

    def tail(self, role: str) -> str:
        return (self._logs / f"{role}.log").read_text(errors="replace")[-3_000:]

    def stop(self) -> None:
        """Stop the processes, the last one started first."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in reversed(self._processes.values()):
            stop_process(process)

    def _launch(self, role: str) -> None:
        command, environ = self._commands[role]
        with (self._logs / f"{role}.log").open("ab") as log:
            self._processes[role] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environ), cwd=self._logs
            )

    def _watch(self) -> None:
        while not self._stopping.wait(RESTART_S):
            for role, process in list(self._processes.items()):
                if process.poll() is not None:
                    self.restarts[role] = self.restarts.get(role, 0) + 1
                    self._launch(role)


def stop_process(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(
    what: str, done: Callable[[], bool], keeper: Keeper, limit_s: float = START_S, every_s: float = 0.2
) -> None:
    """Poll until `done`. Raises TimeoutError, and RuntimeError if a process ends."""
    until_s = time.monotonic() + limit_s
    while not done():
        keeper.check()
        if time.monotonic() > until_s:
            raise TimeoutError(f"not reached in time: what={what} limit_s={limit_s:g}")
        time.sleep(every_s)


def configuration_lines(text: str) -> int:
    """Count the lines of a file that are neither empty nor a comment."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def pids_by_role(stack: Stack) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for pid, role in versus_processes.roles(versus_processes.processes(), stack.keeper.roots(), stack.role).items():
        found.setdefault(role, []).append(pid)
    return found
