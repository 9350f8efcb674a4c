"""Supervision: what dies is restarted, a refused configuration is not, and nothing outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.base.clock import SystemClock
from tidemill.base.errors import Invalid
from tidemill.node.supervise import ChildSpec, Supervisor

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
DEADLINE_S = 20.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_child_comes_back_under_a_new_pid_and_stop_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        failures: list[BaseException] = []
        supervisor = Supervisor(tmp_path, SystemClock(), failures.append)
        child = supervisor.add(ChildSpec("sleeper", SLEEPER))
        await until(lambda: child.pid)
        first = child.pid
        assert child.kill()
        await until(lambda: child.pid not in (None, first))
        second = child.pid
        assert second is not None
        assert child.restarts == 1
        await supervisor.stop()
        assert not alive(second)
        assert failures == []

    asyncio.run(scenario())


def test_a_child_that_refuses_its_configuration_is_not_restarted_and_its_sentence_is_handed_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        failures: list[BaseException] = []
        supervisor = Supervisor(tmp_path, SystemClock(), failures.append)
        program = "import sys; print('tidemill: node.http is taken.', file=sys.stderr); sys.exit(2)"
        child = supervisor.add(ChildSpec("refuses", [sys.executable, "-c", program]))
        await until(lambda: failures)
        assert isinstance(failures[0], Invalid)
        assert "node.http is taken." in str(failures[0])
        assert child.restarts == 0
        await supervisor.stop()

    asyncio.run(scenario())


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from tidemill.base.clock import SystemClock
from tidemill.node.supervise import ChildSpec, Supervisor
async def main():
    supervisor = Supervisor(Path({str(tmp_path)!r}), SystemClock(), print)
    child = supervisor.add(ChildSpec("sleeper", {SLEEPER!r}))
    while child.pid is None:
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(DEADLINE_S)
    asyncio.run(until(lambda: not alive(pid)))


def test_an_unwritable_data_directory_is_refused_by_name(tmp_path: Path) -> None:
    from tidemill.node.config import parse
    from tidemill.node.processes import start_all

    (tmp_path / "file").write_text("")
    config = parse({"node": {"data": str(tmp_path / "file" / "data")}}, origin="")
    with pytest.raises(Invalid, match=r"node\.data"):
        start_all(config, SystemClock(), print)
