"""Supervision: one parent, a few child processes, restarts with back-off, no child outlives its parent.

A child is a unit of failure: it ends alone. What it said last is told under its marks (`pipeline:NAME`, `node:NAME`)
with an age that survives its restarts, until it has run steadily again. A child that exits with code 2 has said in
one sentence what is wrong with its configuration: it is parked, and tried again when its file changes or after
PARKED_PAUSE_S. Two things end everything: a node that refuses its configuration before it ever ran, for there is
nothing yet, and one that exits with code 5, for the bucket belongs to another cluster now.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import ClusterReplacedError, InvalidError
from tidemill.base.runtime.private_directories import make_private_directory
from tidemill.base.runtime.tasks import Tasks, sentence
from tidemill.base.status.status import StatusTracker
from tidemill.node.supervise import child_launch

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
STABLE_AFTER_S = 20.0
STOP_TIMEOUT_S = 20.0
EXIT_CONFIGURATION = 2
EXIT_REPLACED = 5
PARKED_PAUSE_S = 10.0
LOOK_S = 0.5
BUDGET_MS = 30_000
"""A child that does not come to run steadily for this long is stuck: more than STABLE_AFTER_S, so that one crash is
none, however it is timed."""
LOG_BYTES = 32 << 20
"""A child's log this large becomes NAME.log.1, in place of an older one."""
WORDS_BYTES = 16 << 10

log = structlog.get_logger()


class ChildSpec(msgspec.Struct, frozen=True):
    """`marks` name the units that end with it; `watch`: files whose change is a reason to try a parked child again;
    `vital`: without it nothing runs."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str] = {}
    marks: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    vital: bool = False


class Child:
    """One supervised process; `restarts` counts unplanned ends."""

    def __init__(
        self, spec: ChildSpec, log_dir: Path, clock: Clock, tracker: StatusTracker, say: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self.log_path = log_dir / f"{spec.name}.log"
        self._clock = clock
        self._tracker = tracker
        self._say = say
        self._said = ""
        self._steady = False
        """It has run for STABLE_AFTER_S, in this life or an earlier one."""
        self._log_from = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def marks(self) -> tuple[str, ...]:
        return self.spec.marks or (f"process:{self.spec.name}",)

    def kill(self) -> bool:
        """SIGKILL, as a crash would; False when it is not running just now."""
        if self.pid is None:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return True

    async def run(self) -> None:
        """Start and restart for ever. Raises InvalidError when a vital child refuses its configuration at once,
        ClusterReplacedError when a child says that its cluster was."""
        attempt = 0
        while True:
            started_s = self._clock.monotonic_s()
            try:
                code = await self._once()
                words = self._last_words(code)
            except Exception as error:
                code, words = 1, f"{self.spec.name} cannot be started: {sentence(error)}"
            if code == EXIT_CONFIGURATION and self.spec.vital and not self._steady:
                raise InvalidError(words)
            if code == EXIT_REPLACED:
                raise ClusterReplacedError(words)
            self.restarts += 1
            if code != 0:  # else it was asked to end: `tidemill pipeline restart`
                self._told(words, code)
            if code == EXIT_CONFIGURATION:
                await self._parked()
                continue
            attempt = 0 if self._clock.monotonic_s() - started_s > STABLE_AFTER_S else attempt + 1
            pause_s = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            await asyncio.sleep(pause_s)

    # telling ----------------------------------------------------------------------------------------
    def _told(self, words: str, code: int) -> None:
        """Under its marks every time; in the terminal and the log when it is news."""
        parked = code == EXIT_CONFIGURATION
        now_ms = self._clock.now_ms()
        for mark in self.marks:
            self._tracker.set(mark, 0, 1, now_ms=now_ms, budget_ms=BUDGET_MS)
            self._tracker.fail(mark, words, now_ms=now_ms, parked=parked)
        if words != self._said:
            self._said = words
            log.warning("child ended", child=self.spec.name, code=code, parked=parked)
            self._say(f"{self.spec.name}: {words}")

    def _healed(self) -> None:
        self._steady = True
        for mark in self.marks:
            if self._tracker.failure(mark) is not None:
                self._tracker.heal(mark)
                self._tracker.remove(mark)
                self._said = ""

    def _last_words(self, code: int) -> str:
        """What this life said last, in a sentence; how it ended when it said nothing."""
        ended = f"killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(self._log_from, self.log_path.stat().st_size - WORDS_BYTES))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        if code < 0 or not lines:
            return f"{self.spec.name} {ended}: log={self.log_path}."
        return _sentence_of(lines[-1])

    async def _parked(self) -> None:
        """Until a watched file is another, or the pause is over."""
        before = [_version(path) for path in self.spec.watch]
        until_s = self._clock.monotonic_s() + PARKED_PAUSE_S
        while self._clock.monotonic_s() < until_s:
            await asyncio.sleep(LOOK_S)
            if [_version(path) for path in self.spec.watch] != before:
                return

    # one life ---------------------------------------------------------------------------------------
    async def _once(self) -> int:
        make_private_directory(self.log_path.parent)
        self._rotate()
        with self.log_path.open("ab") as output:
            self._log_from = self.log_path.stat().st_size
            self._process = await asyncio.create_subprocess_exec(
                *launched(self.spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.spec.environ},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which stops children in order
            )
        try:
            return await self._watched(self._process)
        except asyncio.CancelledError:
            await self._stop()
            raise

    async def _watched(self, process: asyncio.subprocess.Process) -> int:
        while True:
            try:
                async with asyncio.timeout(STABLE_AFTER_S):
                    return await process.wait()
            except TimeoutError:
                self._healed()
                self._rotate()

    def _rotate(self) -> None:
        """Copied and emptied, for the child holds the file open (for appending)."""
        try:
            if self.log_path.stat().st_size > LOG_BYTES:
                shutil.copyfile(self.log_path, self.log_path.with_suffix(".log.1"))
                os.truncate(self.log_path, 0)
                self._log_from = 0
        except OSError as error:
            if self.log_path.exists():
                log.warning("log is not rotated", log=str(self.log_path), error=error.strerror)

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


def _sentence_of(line: str) -> str:
    """A line of a log as a sentence: our own logs are JSON, a traceback ends with its error."""
    try:
        found = json.loads(line)
    except ValueError:
        return " ".join(line.split())[:500]
    if not isinstance(found, dict):
        return line[:500]
    said = [str(found[key]) for key in ("event", "part", "unit", "error", "exception") if found.get(key)]
    return " ".join(": ".join(said).split())[:500] or line[:500]


def _version(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one


def launched(command: Sequence[str]) -> list[str]:
    """`command`, which ends (SIGTERM) when this process has, however that ended."""
    return [sys.executable, "-IS", child_launch.__file__, str(os.getpid()), *command]


class Supervisor:
    """Runs children until `stop`. `on_failure` hears what ends everything; `say` each thing a child ended with, once;
    `tracker` holds their marks while they fail."""

    def __init__(
        self,
        log_dir: Path,
        clock: Clock,
        on_failure: Callable[[BaseException], None],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._say = say
        self._tasks = Tasks(lambda _, error: on_failure(error))
        self.tracker = StatusTracker()
        self.children: dict[str, Child] = {}

    def add(self, spec: ChildSpec) -> Child:
        child = Child(spec, self._log_dir, self._clock, self.tracker, self._say)
        self.children[spec.name] = child
        self._tasks.spawn(child.run(), name=f"supervise-{spec.name}")
        return child

    async def stop(self) -> None:
        await self._tasks.aclose()
