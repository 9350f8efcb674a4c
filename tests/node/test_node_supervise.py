"""Supervision: dead children restart, a rejected configuration does not, and no child outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from support.waiting import DEADLINE_S, until
from tidemill.base.clock import SystemClock
from tidemill.base.errors import ClusterReplacedError, InvalidError
from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.status import StageState, StatusReport, derive_status, derive_statuses
from tidemill.node.supervise.supervisor import ChildSpec, Supervisor, launch_command

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_killed_child_comes_back_under_a_new_pid_and_stop_ends_it(tmp_path: Path) -> None:
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
    [(process, ended)] = supervisor.recent_restarts().items()
    assert (process, ended["count"]) == ("process:sleeper", 1)
    assert "killed by SIGKILL" in str(ended["reason"])
    await supervisor.stop()
    assert not alive(second)
    assert failures == []


async def test_a_node_whose_cluster_was_replaced_ends_everything_also_after_it_ran_steadily(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    supervisor = Supervisor(tmp_path, SystemClock(), failures.append)
    said = "import sys; print('tidemill: The bucket belongs to another cluster.'); sys.exit(5)"
    child = supervisor.add(ChildSpec("node", [sys.executable, "-c", said], vital=True))
    child._steady = True
    await until(lambda: failures)
    assert isinstance(failures[0], ClusterReplacedError)
    assert "The bucket belongs to another cluster" in str(failures[0])
    await supervisor.stop()


async def test_a_child_that_was_asked_to_end_is_started_anew_and_tells_no_failure(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(tmp_path, SystemClock(), print, said.append)
    child = supervisor.add(ChildSpec("ends", [sys.executable, "-c", "pass"], marks=("pipeline:p",)))
    await until(lambda: child.restarts >= 2)
    assert supervisor.tracker.failure("pipeline:p") is None and not said
    assert supervisor.recent_restarts() == {}
    await supervisor.stop()


REFUSES = [sys.executable, "-c", "import sys; print('tidemill: node.http is taken.', file=sys.stderr); sys.exit(2)"]


async def test_a_node_that_refuses_its_configuration_at_once_ends_everything_with_its_sentence(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    supervisor = Supervisor(tmp_path, SystemClock(), failures.append)
    child = supervisor.add(ChildSpec("refuses", REFUSES, vital=True))
    await until(lambda: failures)
    assert isinstance(failures[0], InvalidError)
    assert "node.http is taken." in str(failures[0])
    assert child.restarts == 0
    await supervisor.stop()


async def test_a_node_that_refuses_only_after_long_ends_everything_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imports of a node alone may take longer than a steady run on a busy machine."""
    monkeypatch.setattr("tidemill.node.supervise.supervisor.STABLE_AFTER_S", 0.05)
    failures: list[BaseException] = []
    supervisor = Supervisor(tmp_path, SystemClock(), failures.append)
    slow = REFUSES[-1].replace("sys.exit", "import time; time.sleep(1); sys.exit")
    child = supervisor.add(ChildSpec("refuses", [*REFUSES[:-1], slow], vital=True))
    await until(lambda: failures)
    assert isinstance(failures[0], InvalidError)
    assert child.restarts == 0
    await supervisor.stop()


@pytest.mark.parametrize(("waiting", "code"), [("starting", 2), ("", 1)])
async def test_only_a_node_that_never_served_refuses_its_configuration(
    monkeypatch: pytest.MonkeyPatch, waiting: str, code: int
) -> None:
    """A node that served is started again: what was wrong may be gone."""
    from tidemill.base.config.config import parse
    from tidemill.cli.serve import _serve
    from tidemill.node.node import Node

    async def fails(node: Node, stop: asyncio.Event) -> None:
        node._context.waiting = waiting
        raise InvalidError("something is wrong.")

    monkeypatch.setattr(Node, "run", fails)
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", lambda *_: None)
    assert await _serve(parse({}, origin="")) == code


async def test_f307_a_pipeline_file_that_does_not_import_parks_its_driver_alone_and_a_correction_starts_it(
    tmp_path: Path,
) -> None:
    """The child is the real driver, up to the point where it would open its stores."""
    from tidemill.base.config.config import parse
    from tidemill.node.supervise.processes import driver_spec

    file = tmp_path / "pipeline.py"
    file.write_text("import nothing_of_that_name\n")
    values = {
        "node": {"data": str(tmp_path / "data")},
        "pipeline": {"shop": {"file": str(file)}},
        "objects": {"url": "ftp://nowhere"},
    }
    spec = driver_spec(parse(values, origin=""), ["shop"])
    failures: list[BaseException] = []
    said: list[str] = []
    supervisor = Supervisor(tmp_path, SystemClock(), failures.append, said.append)
    other = supervisor.add(ChildSpec("other", SLEEPER))
    supervisor.add(spec)
    await until(lambda: supervisor.tracker.failure("pipeline:shop"))
    failure = supervisor.tracker.failure("pipeline:shop")
    assert failure is not None and failure.parked
    assert "line=1 error=ModuleNotFoundError" in failure.error
    (mark,) = supervisor.tracker.report("up", 0).marks
    assert (mark.name, mark.held_by) == ("pipeline:shop", "operator")
    file.write_text("def build(p):\n    p.table('t', p.topic('t', key='a', schema='a long'))\n")
    await until(lambda: len(said) > 1)  # long before the pause ends, because its file changed
    assert "objects.url" in said[1], "it got further, to the next thing that is wrong"
    assert len(set(said)) == len(said) and other.pid and not failures
    first = failure.since_ms
    again = supervisor.tracker.failure("pipeline:shop")
    assert again is not None and (again.since_ms, again.tries) == (first, 2)
    await supervisor.stop()


def test_each_pipeline_of_a_driver_has_its_own_freshness(tmp_path: Path) -> None:
    from tidemill.base.config.config import parse
    from tidemill.node.supervise.processes import driver_spec

    values = {
        "node": {"data": str(tmp_path / "data")},
        "pipeline": {
            "slow": {"file": "slow.py", "driver": "small", "freshness_s": 10},
            "usual": {"file": "usual.py", "driver": "small"},
        },
    }
    command = driver_spec(parse(values, origin=""), ["slow", "usual"]).command
    assert [value for key, value in pairwise(command) if key == "--freshness-ms"] == ["10000", "100"]
    assert [value for key, value in pairwise(command) if key == "--name"] == ["slow", "usual"]
    assert [value for key, value in pairwise(command) if key == "--dead-letters-ms"] == ["604800000"]


async def test_f310_a_child_that_ends_again_and_again_is_told_with_its_last_words_and_one_age(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(tmp_path, SystemClock(), lambda _: None, said.append)
    program = "import sys; sys.stderr.write('Traceback\\ntidemill: OSError: the bucket is away\\n'); sys.exit(1)"
    child = supervisor.add(ChildSpec("driver", [sys.executable, "-c", program], marks=("pipeline:shop",)))
    await until(lambda: child.restarts >= 3)
    failure = supervisor.tracker.failure("pipeline:shop")
    assert failure is not None and (failure.tries, failure.parked) == (child.restarts, False)
    assert failure.error == "OSError: the bucket is away"
    assert said == ["driver: OSError: the bucket is away"]
    (mark,) = supervisor.tracker.report("up", 0).marks
    stuck_ms = failure.since_ms + mark.budget_ms + 1
    assert derive_status(mark, "up", stuck_ms, stuck_ms).state is StageState.STUCK
    await supervisor.stop()


async def test_f317_a_shared_driver_that_dies_or_freezes_is_named_for_every_pipeline_of_it(tmp_path: Path) -> None:
    processes = ("pipeline:a", "pipeline:b:2")
    said: list[str] = []
    supervisor = Supervisor(tmp_path, SystemClock(), lambda _: None, said.append)
    child = supervisor.add(ChildSpec("driver-small", SLEEPER, marks=processes))
    await until(lambda: child.pid)
    assert child.kill()
    await until(lambda: child.restarts)
    failures = [supervisor.tracker.failure(mark) for mark in processes]
    assert ["killed by SIGKILL" in failure.error for failure in failures if failure is not None] == [True, True]
    assert len(said) == 1
    await supervisor.stop()
    reports = [StatusReport(process, 0, (), pid=7, host="here") for process in processes]
    marks = derive_statuses(reports, STATUS_BLIND_AFTER_MS + 1)
    assert [marks[f"process:{process}"].mark.held_by for process in processes] == ["pid 7 on here"] * 2


async def test_the_last_words_of_a_life_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "quiet.log").write_text("an earlier life said this\n")
    supervisor = Supervisor(tmp_path, SystemClock(), lambda _: None)
    supervisor.add(ChildSpec("quiet", [sys.executable, "-c", "raise SystemExit(7)"]))
    await until(lambda: supervisor.tracker.failure("process:quiet"))
    failure = supervisor.tracker.failure("process:quiet")
    assert failure is not None and "ended with code 7" in failure.error
    await supervisor.stop()


async def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidemill.node.supervise import supervisor as supervise

    monkeypatch.setattr(supervise, "LOG_BYTES", 10_000)
    program = "print('x' * 8_000); print('the end')"
    supervisor = Supervisor(tmp_path, SystemClock(), lambda _: None)
    child = supervisor.add(ChildSpec("talks", [sys.executable, "-c", program]))
    await until(lambda: child.restarts >= 4)
    await supervisor.stop()
    assert (tmp_path / "talks.log").stat().st_size <= 10_000 + 2 * 8_100
    assert (tmp_path / "talks.log.1").stat().st_size > 10_000


def test_no_password_is_on_a_command_line_or_in_a_file_that_others_may_read(tmp_path: Path) -> None:
    from tidemill.base.config.config import parse
    from tidemill.node.supervise import processes

    values = {
        "node": {"data": str(tmp_path / "data")},
        "consensus": {"url": "postgresql://u:s3cret@127.0.0.1:1/x"},
        "capture": {"shop": {"dsn": "postgresql://u:s3cret@127.0.0.1:1/x"}},
        "pipeline": {"shop": {"file": "pipeline.py"}},
    }
    config = parse(values, origin="")
    added: list[ChildSpec] = []

    class Recording:
        def add(self, spec: ChildSpec) -> None:
            added.append(spec)

    old = tmp_path / "data" / "resolved.json"
    old.parent.mkdir()
    old.write_text("of an earlier version")
    old.chmod(0o644)
    processes.start_all(config, SystemClock(), print, supervisor=Recording())  # type: ignore[arg-type]
    assert [spec.name for spec in added] == ["node", "pipeline-shop"]
    assert not [part for spec in added for part in spec.command if "s3cret" in part]
    assert "s3cret" in added[1].environ["TIDEMILL_CONSENSUS__URL"]
    assert "s3cret" in old.read_text() and old.stat().st_mode & 0o777 == 0o600
    for path in old.parent.rglob("*"):
        assert not path.is_file() or path.stat().st_mode & 0o077 == 0


def test_a_configuration_reaches_the_node_in_a_locale_without_utf_8(tmp_path: Path) -> None:
    program = r"""
import sys
from pathlib import Path
from tidemill.base.config.config import parse
from tidemill.cli import serve
from tidemill.node.supervise.processes import write_private

sys.argv[1:] = ["resolved.json"]
config = parse({"capture": {"shop": {"dsn": "x", "tables": ["public.\u0437\u0430\u043a\u0430"]}}}, origin="")
write_private(Path(sys.argv[1]), config.model_dump_json())
serve._preload_modules = lambda config: sys.exit(ascii(config.capture["shop"].tables))
serve.main()
"""
    environ = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stderr == ascii(["public.зака"]) + "\n"
    assert "зака" in (tmp_path / "resolved.json").read_text(encoding="utf-8")


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from tidemill.base.clock import SystemClock
from tidemill.node.supervise.supervisor import ChildSpec, Supervisor
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


def test_a_child_whose_parent_is_gone_before_it_begins_does_not_begin(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = launch_command(["touch", str(begun)])
    assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == 0
    assert begun.exists()
    begun.unlink()
    command[command.index(str(os.getpid()))] = str(os.getppid())
    assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == 0
    assert not begun.exists()


async def test_a_command_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(tmp_path, SystemClock(), print, said.append)
    supervisor.add(ChildSpec("absent", [str(tmp_path / "absent")]))
    await until(lambda: said)
    assert said == [f"absent: {tmp_path / 'absent'} cannot be run: No such file or directory."]
    await supervisor.stop()


def test_an_unwritable_data_directory_is_refused_by_name(tmp_path: Path) -> None:
    from tidemill.base.config.config import parse
    from tidemill.node.supervise.processes import start_all

    (tmp_path / "file").write_text("")
    config = parse({"node": {"data": str(tmp_path / "file" / "data")}}, origin="")
    with pytest.raises(InvalidError, match=r"node\.data"):
        start_all(config, SystemClock(), print)
