"""Supervision: one parent, a few child processes, restarts with back-off, no child outlives its parent.

A child that exits with code 2 has said in one sentence what is wrong with its configuration: restarting
cannot help, so the supervisor stops everything and hands the sentence on. Any other exit is restarted.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import Invalid
from tidemill.base.tasks import Tasks

PR_SET_PDEATHSIG = 1
BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
STABLE_AFTER_S = 20.0
STOP_TIMEOUT_S = 20.0
EXIT_CONFIGURATION = 2

log = structlog.get_logger()


class ChildSpec(msgspec.Struct, frozen=True):
    name: str
    command: Sequence[str]
    environ: Mapping[str, str] = {}


class Child:
    """One supervised process; `restarts` counts unplanned ends."""

    def __init__(self, spec: ChildSpec, log_dir: Path, clock: Clock) -> None:
        self.spec = spec
        self.restarts = 0
        self.log_path = log_dir / f"{spec.name}.log"
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    def kill(self) -> bool:
        """SIGKILL, as a crash would; False when it is not running just now."""
        if self.pid is None:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return True

    async def run(self) -> None:
        """Start and restart for ever. Raises Invalid when the child reports a configuration error."""
        attempt = 0
        while True:
            started_s = self._clock.monotonic_s()
            code = await self._once()
            if code == EXIT_CONFIGURATION:
                raise Invalid(self._last_line() or f"{self.spec.name} refused its configuration: log={self.log_path}.")
            self.restarts += 1
            attempt = 0 if self._clock.monotonic_s() - started_s > STABLE_AFTER_S else attempt + 1
            pause_s = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            log.warning("child ended", child=self.spec.name, code=code, restart_in_s=pause_s)
            await asyncio.sleep(pause_s)

    async def _once(self) -> int:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.spec.environ},
                preexec_fn=_die_with_parent,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which stops children in order
            )
        try:
            return await self._process.wait()
        except asyncio.CancelledError:
            await self._stop()
            raise

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _last_line(self) -> str:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Supervisor:
    """Runs children until `stop`; `on_failure` hears of configuration errors."""

    def __init__(self, log_dir: Path, clock: Clock, on_failure: Callable[[BaseException], None]) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._on_failure = on_failure
        self._tasks = Tasks(lambda _, error: on_failure(error))
        self.children: dict[str, Child] = {}

    def add(self, spec: ChildSpec) -> Child:
        child = Child(spec, self._log_dir, self._clock)
        self.children[spec.name] = child
        self._tasks.spawn(child.run(), name=f"supervise-{spec.name}")
        return child

    async def stop(self) -> None:
        await self._tasks.aclose()
