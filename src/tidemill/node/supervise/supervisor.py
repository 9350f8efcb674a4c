"""Supervision: one parent, a few child processes, restarts with back-off. No child outlives its parent.

A child is a unit of failure: it ends alone. Its last words are reported under its stages (`pipeline:NAME`,
`node:NAME`), with an age that survives its restarts, until it has run steadily again. A child that exits with code 2
never served, and has printed in one sentence what is wrong with its configuration: it is paused, and tried again when
its file changes or after CONFIGURATION_RETRY_S.

Two events end everything: a node that refuses its configuration before it ever ran, because nothing works yet, and a
child that exits with code 5, because the bucket now belongs to another cluster.
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
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.base.status.logging import LOG_BYTES
from tidemill.base.status.status import StatusTracker
from tidemill.node.supervise import child_launch

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
STABLE_AFTER_S = 20.0
STOP_TIMEOUT_S = 20.0
EXIT_CONFIGURATION = 2
EXIT_REPLACED = 5
CONFIGURATION_RETRY_S = 10.0
POLL_INTERVAL_S = 0.5
BUDGET_MS = 30_000
"""Time after which a child that does not run steadily counts as stuck: more than STABLE_AFTER_S, so that one crash
is never reported as stuck."""
LAST_WORDS_BYTES = 16 << 10
RESTART_SHOWN_MS = 300_000
"""Time for which the end of a child is reported after it was started again."""

log = structlog.get_logger()


class ChildSpec(msgspec.Struct, frozen=True):
    """Description of a child. `marks` name the stages that fail with it. A change of a file in `watch` is a reason
    to try a paused child again. Without a `vital` child nothing runs."""

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
        self.ended_ms = 0
        """Time of the last unplanned end; 0 = there was none."""
        self.ended_with = ""
        self.log_path = log_dir / f"{spec.name}.log"
        self._clock = clock
        self._tracker = tracker
        self._say = say
        self._said = ""
        self._steady = False
        """Set once a process of this child has run for STABLE_AFTER_S, whether it served or still starts."""
        self._log_from = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def marks(self) -> tuple[str, ...]:
        return self.spec.marks or (f"process:{self.spec.name}",)

    def kill(self) -> bool:
        """Send SIGKILL, like a crash. Return False when the child is not running now."""
        if self.pid is None:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return True

    async def run(self) -> None:
        """Start and restart forever. Raises InvalidError when a vital child refuses its configuration before it ever
        ran steadily, ClusterReplacedError when a child reports that its cluster was replaced."""
        attempt = 0
        while True:
            started_s = self._clock.monotonic_s()
            was_steady = self._steady  # this process may have taken long to refuse: that is no steady run
            try:
                code = await self._run_process()
                words = self._last_words(code)
            except Exception as error:
                code, words = 1, f"{self.spec.name} cannot be started: {error_sentence(error)}"
            if code == EXIT_CONFIGURATION and self.spec.vital and not was_steady:
                raise InvalidError(words)
            if code == EXIT_REPLACED:
                raise ClusterReplacedError(words)
            self.restarts += 1
            if code != 0:  # code 0: it was asked to end, by `tidemill pipeline restart`
                self._report_failure(words, code)
            if code == EXIT_CONFIGURATION:
                await self._wait_while_paused()
                continue
            attempt = 0 if self._clock.monotonic_s() - started_s > STABLE_AFTER_S else attempt + 1
            pause_s = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            await asyncio.sleep(pause_s)

    # reporting --------------------------------------------------------------------------------------
    def _report_failure(self, words: str, code: int) -> None:
        """Report the error under the child's stages every time; in the terminal and the log only when it is new."""
        is_paused = code == EXIT_CONFIGURATION
        now_ms = self._clock.now_ms()
        self.ended_ms, self.ended_with = now_ms, words
        for mark in self.marks:
            self._tracker.set(mark, 0, 1, now_ms=now_ms, budget_ms=BUDGET_MS)
            self._tracker.fail(mark, words, now_ms=now_ms, parked=is_paused)
        if words != self._said:
            self._said = words
            log.warning("child ended", child=self.spec.name, code=code, parked=is_paused)
            self._say(f"{self.spec.name}: {words}")

    def _clear_failure(self) -> None:
        self._steady = True
        for mark in self.marks:
            if self._tracker.failure(mark) is not None:
                self._tracker.clear_failure(mark)
                self._tracker.remove(mark)
                self._said = ""

    def _last_words(self, code: int) -> str:
        """Return the last line of this process as a sentence, or how it ended if it printed nothing."""
        ended = f"killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(self._log_from, self.log_path.stat().st_size - LAST_WORDS_BYTES))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        if code < 0 or not lines:
            return f"{self.spec.name} {ended}: log={self.log_path}."
        return _log_line_sentence(lines[-1])

    async def _wait_while_paused(self) -> None:
        """Return when a watched file has changed or the pause has expired."""
        before = [_file_version(path) for path in self.spec.watch]
        until_s = self._clock.monotonic_s() + CONFIGURATION_RETRY_S
        while self._clock.monotonic_s() < until_s:
            await asyncio.sleep(POLL_INTERVAL_S)
            if [_file_version(path) for path in self.spec.watch] != before:
                return

    # one process ------------------------------------------------------------------------------------
    async def _run_process(self) -> int:
        make_private_directory(self.log_path.parent)
        self._rotate_log()
        with self.log_path.open("ab") as output:
            self._log_from = self.log_path.stat().st_size
            self._process = await asyncio.create_subprocess_exec(
                *launch_command(self.spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.spec.environ},
                start_new_session=True,  # Ctrl-C reaches the parent only, which stops the children cleanly
            )
        try:
            return await self._wait_for_exit(self._process)
        except asyncio.CancelledError:
            await self._stop_process()
            raise

    async def _wait_for_exit(self, process: asyncio.subprocess.Process) -> int:
        while True:
            try:
                async with asyncio.timeout(STABLE_AFTER_S):
                    return await process.wait()
            except TimeoutError:
                self._clear_failure()
                self._rotate_log()

    def _rotate_log(self) -> None:
        """Copy and truncate the log, because the child holds the file open for appending."""
        try:
            if self.log_path.stat().st_size > LOG_BYTES:
                shutil.copyfile(self.log_path, self.log_path.with_suffix(".log.1"))
                os.truncate(self.log_path, 0)
                self._log_from = 0
        except OSError as error:
            if self.log_path.exists():
                log.warning("log not rotated", log=str(self.log_path), error=error.strerror)

    async def _stop_process(self) -> None:
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


def _log_line_sentence(line: str) -> str:
    """Return a log line as a sentence: our own logs are JSON, and a traceback ends with its error."""
    try:
        found = json.loads(line)
    except ValueError:
        return " ".join(line.removeprefix("tidemill: ").split())[:500]  # an error of a command
    if not isinstance(found, dict):
        return line[:500]
    said = [str(found[key]) for key in ("event", "part", "unit", "error", "exception") if found.get(key)]
    return " ".join(": ".join(said).split())[:500] or line[:500]


def _file_version(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal


def launch_command(command: Sequence[str]) -> list[str]:
    """Wrap `command` so that it gets SIGTERM when this process ends, however it ends."""
    return [sys.executable, "-IS", child_launch.__file__, str(os.getpid()), *command]


class Supervisor:
    """Supervisor of children until `stop`. `on_failure` receives the error that ends everything; `say` receives each
    error of a child once; `tracker` holds their stage statuses while they fail."""

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

    def recent_restarts(self) -> dict[str, dict[str, object]]:
        """Return {process: {"at_ms", "count", "reason"}} of the children that ended unexpectedly a short time ago."""
        since_ms = self._clock.now_ms() - RESTART_SHOWN_MS
        return {
            mark: {"at_ms": child.ended_ms, "count": child.restarts, "reason": child.ended_with}
            for child in self.children.values()
            if child.ended_ms > since_ms
            for mark in child.marks
        }

    async def stop(self) -> None:
        await self._tasks.aclose()
