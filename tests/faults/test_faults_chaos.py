"""A short `./dev bench chaos`, and proof that its checker finds lost, repeated and reordered records."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.waiting import eventually

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import chaos
from chaos_judge import (
    Acked,
    Committed,
    Stored,
    judge_coverage,
    judge_group,
    judge_producer,
    judge_transactions,
    longest_stall,
    stalls_by_producer,
)
from chaos_store import FAULTS_PATH, Misbehaving
from chaos_thread import Worker, end_all

PLACE = ("t", 0)


@pytest.mark.extended
def test_three_nodes_killed_and_frozen_while_their_stores_fail_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    found = chaos.Chaos(tmp_path, 1).run(0.0, ("lose+freeze", "away+kill"))
    assert found["failures"] == []
    assert found["throws"] == {"lose": 1, "freeze": 1, "away": 1, "kill": 1}
    verified = found["verified"]
    assert verified["once"] + verified["plain"] >= sum(found["acknowledged"].values()) > 0
    assert verified["copy"] == verified["once"]
    assert all(each["committed"] for each in found["transactions"].values())
    assert found["bucket"]["lost"] > 0


class Doing(Worker):
    def __init__(self, what: Callable[[Doing], None]) -> None:
        super().__init__("doing")
        self._what = what

    @property
    def asked(self) -> threading.Event:
        return self._stop

    def _run(self) -> None:
        self._what(self)


def test_a_client_that_breaks_or_does_not_end_is_told_and_nobody_waits_for_it() -> None:
    def breaks(_: Doing) -> None:
        raise ValueError("why")

    released = threading.Event()
    workers = [
        Doing(breaks),
        Doing(lambda own: own.asked.wait(60)),
        Doing(lambda _: released.wait(60)),
    ]
    for worker in workers:
        worker.start()
    end_all(workers, 2.0)
    try:
        assert [worker.failed for worker in workers[::2]] == [["it broke: ValueError('why')"], ["it does not end"]]
        workers[1].join(float("inf"))
        assert not workers[1].runs
    finally:
        released.set()


HANGS = """
import subprocess, sys, time
from chaos_watch import Watch

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
with Watch(float(sys.argv[1]), lambda: print("how far", flush=True), lambda: print("what is known", flush=True), 0.2):
    print(child.pid, flush=True)
    while True:
        time.sleep(1)
"""


def hanging(limit_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HANGS, str(limit_s)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=Path(chaos.__file__).parent, stdout=pipe, stderr=pipe, text=True)


def test_a_run_that_hangs_says_what_is_known_and_ends_with_all_that_it_started() -> None:
    process = hanging(1.0)
    said, stacks = process.communicate(timeout=60)
    assert process.returncode == 1
    *how_far, last = said.splitlines()
    [child] = set(how_far) - {"how far"}
    assert last == "what is known"
    assert "Thread" in stacks
    ends(int(child))


def test_a_run_that_is_told_to_end_leaves_nothing_behind() -> None:
    with hanging(600.0) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 1
    ends(child)


def ends(pid: int) -> None:
    eventually(lambda: not runs(pid), "it still runs")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_phase_that_breaks_is_among_the_failures_and_the_next_one_does_what_it_can(tmp_path: Path) -> None:
    run = chaos.Chaos(tmp_path, 1)
    done = []
    for phase in ("one", "two"):
        with run._during(phase):
            done.append(phase)
            raise TimeoutError("late")
    assert done == ["one", "two"]
    assert run.found()["failures"] == ["one: TimeoutError('late')", "two: TimeoutError('late')"]


def stored(*values: str) -> list[Stored]:
    return [Stored(offset, value) for offset, value in enumerate(values)]


def acked(*offsets: int) -> list[Acked]:
    """Acknowledgements of the first numbers, at these offsets."""
    return [Acked(0.0, number, offset) for number, offset in enumerate(offsets)]


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (stored("p 0", "q 0", "p 1", "p 2"), ""),
        (stored("p 0", "q 0", "p 1"), "lost 1 acknowledged of p in t/0: [2]"),
        (stored("p 0", "q 0", "p 1", "p 2", "p 1"), "stored 1 twice of p in t/0: [1]"),
        (stored("p 0", "q 0", "p 1", "p 2", "p 7"), "never sent by p in t/0: [7]"),
        (stored("p 0", "p 1", "q 0", "p 2"), "acknowledged at another offset 1 of p in t/0: [1]"),
    ],
)
def test_what_a_producer_was_told_is_held_beside_what_is_there(contents: list[Stored], said: str) -> None:
    found = judge_producer("p", PLACE, contents, 4, acked(0, 2, 3), once=True)
    assert found == ([said] if said else [])


def test_a_record_before_its_elder_is_seen_with_and_without_an_id() -> None:
    contents = stored("p 1", "p 0")
    for once in (True, False):
        (found,) = judge_producer("p", PLACE, contents, 2, acked(1, 0), once=once)
        assert found == "reordered 1 of p in t/0: [0]"


def test_a_batch_sent_again_without_an_id_keeps_its_first_order() -> None:
    contents = stored("p 0", "p 1", "p 0", "p 1", "p 2")
    assert judge_producer("p", PLACE, contents, 3, acked(2, 3, 4), once=False) == []
    assert judge_producer("p", PLACE, contents, 3, acked(-1, 3, 4), once=True) == ["stored 2 twice of p in t/0: [0, 1]"]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (["p 0 0", "p 2 0"], ["p 0 1", "p 2 1"], []),
        (["p 2 0"], ["p 2 1"], ["lost committed transactions of p: 1, first [0]"]),
        (["p 0 0", "p 1 0"], ["p 0 1", "p 1 1"], ["shown aborted transactions of p: 1, first [1]"]),
        (["p 0 0", "p 2 0"], ["p 0 1"], ["not whole transactions of p: 1, first [2]"]),
        (["p 2 0", "p 0 0"], ["p 0 1", "p 2 1"], ["reordered or twice in p in t/0: [(0, 0)]"]),
    ],
)
def test_a_reader_of_what_is_committed_is_judged_by_whole_transactions(
    first: list[str], second: list[str], said: list[str]
) -> None:
    contents = {("t", 0): stored(*first), ("t", 1): stored(*second)}
    assert judge_transactions("p", contents, 2, {0}, {1}) == said


def test_a_group_that_is_told_less_than_was_committed_before_it_asked_went_back() -> None:
    history = [
        Committed(1.0, 2.0, PLACE, 10, False),
        Committed(1.5, 3.0, PLACE, 5, True),  # asked before the commit was acknowledged
        Committed(4.0, 5.0, PLACE, 20, False),
        Committed(4.5, 5.5, PLACE, 10, True),
    ]
    assert judge_group("g", history) == []
    assert judge_group("g", [*history, Committed(6.0, 7.0, PLACE, 19, True)]) == [
        "group g went back in t/0: from 20 to 19"
    ]
    assert judge_group("g", [*history, Committed(6.0, 7.0, PLACE, -1, True)]) != []


def test_a_record_below_a_groups_offset_that_no_member_was_handed_is_seen() -> None:
    handed = [(0, 3), (5, 9), (2, 6)]
    assert judge_coverage("g", PLACE, range(10), handed, 10) == []
    assert judge_coverage("g", PLACE, range(12), handed, 10) == []
    (found,) = judge_coverage("g", PLACE, range(12), handed, 12)
    assert "never handed 2 of 12" in found
    (found,) = judge_coverage("g", PLACE, range(6), [(0, 1), (3, 5)], 6)
    assert found.endswith("[2]")


def test_a_stall_is_told_with_and_without_the_time_in_which_nobody_could_answer() -> None:
    times = {"a": [1.0, 2.0, 15.0], "b": [4.0, 9.5, 14.0]}
    found = longest_stall(times, 0.0, 15.5, [(3.5, 13.5)])
    assert (found.net_s, found.raw_s, found.at_s, found.whose) == (3.5, 4.0, 0.0, "b")
    found = longest_stall(times, 0.0, 15.5, [])
    assert (found.raw_s, found.at_s, found.whose) == (13.0, 2.0, "a")


def test_a_partition_stalls_for_as_long_as_nobody_is_acknowledged_in_it() -> None:
    acked = {("a", PLACE): [1.0, 9.0], ("b", PLACE): [4.0], ("b", ("t", 1)): [3.0, 8.0]}
    found = stalls_by_producer(acked, 0.0, 10.0, [])
    assert {name: (stall.net_s, stall.whose) for name, stall in found.items()} == {
        "a": (8.0, "a in t/0"),
        "b": (6.0, "b in t/0"),
        "anybody": (5.0, "anybody in t/0"),
    }


def ask(app: Misbehaving, path: str, body: bytes = b"") -> tuple[str, list[str]]:
    said: list[str] = []
    environ: dict[str, Any] = {
        "PATH_INFO": path,
        "REQUEST_METHOD": "PUT",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
    }
    answer = app(environ, lambda status, _: said.append(status))
    return said[0], [each.decode() for each in answer]


def test_the_bucket_refuses_before_and_loses_answers_after_it_has_done_what_was_asked() -> None:
    done: list[str] = []

    def inner(environ: dict[str, Any], respond: Any) -> list[bytes]:
        done.append(environ["PATH_INFO"])
        respond("200 OK", [])
        return [b"done"]

    app = Misbehaving(inner, 1)
    assert ask(app, "/a") == ("200 OK", ["done"])
    ask(app, FAULTS_PATH, json.dumps({"refuse": 1.0}).encode())
    assert ask(app, "/b", b"data")[0].startswith("503")
    ask(app, FAULTS_PATH, json.dumps({"lose": 1.0}).encode())
    assert ask(app, "/c")[0].startswith("503")
    assert done == ["/a", "/c"]
    _, (served,) = ask(app, FAULTS_PATH, b"{}")
    assert json.loads(served) == {"requests": 3, "refused": 1, "lost": 1}
    assert ask(app, "/d")[0] == "200 OK"
