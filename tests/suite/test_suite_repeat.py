"""CI repeats at most five failed tests, and fails for everything else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from toy import FAILS_ONCE, Toy

from suite.recording import Record
from suite.repeat_failed import judge

REPEAT = (sys.executable, str(Path(__file__).parent / "repeat_failed.py"))


def failed(*tests: str, status: int | None = 1, broken: Sequence[str] = ()) -> Record:
    outcomes = {"passes": "passed", **dict.fromkeys(tests, "failed")}
    return Record(outcomes, {test: f"output of {test}" for test in tests}, list(broken), status)


def passed(*tests: str) -> Record:
    return Record(dict.fromkeys(tests, "passed"), status=0)


class Runs:
    """Answers each run with the next record, and stores its arguments."""

    def __init__(self, *records: Record) -> None:
        self.records, self.asked, self.said = list(records), [], ""

    def __call__(self, more: Sequence[str]) -> Record:
        self.asked.append(list(more))
        return self.records.pop(0)

    def judged(self) -> bool:
        def say(text: str) -> None:
            self.said += f"{text}\n"

        return judge(self, say)


def test_a_run_without_a_failure_succeeds_and_nothing_is_repeated() -> None:
    runs = Runs(passed("a"))
    assert runs.judged()
    assert runs.asked == [[]]


def test_failed_tests_that_pass_three_more_times_alone_are_flaky_and_the_run_succeeds() -> None:
    runs = Runs(failed("a", "b"), *[passed("a", "b")] * 3)
    assert runs.judged()
    assert runs.asked == [[]] + [["-n", "0", "a", "b"]] * 3
    assert "flaky: a" in runs.said and "flaky: b" in runs.said
    assert "output of a" in runs.said and "output of b" in runs.said


def test_one_failure_in_three_repeats_fails_the_run() -> None:
    runs = Runs(failed("a", "b"), passed("a", "b"), failed("b"), passed("a", "b"))
    assert not runs.judged()
    assert "flaky: b" not in runs.said
    assert "failed: b  passed 2 of 3" in runs.said


@pytest.mark.parametrize(
    "again",
    [passed("a"), Record({"a": "passed", "b": "skipped"}, status=0), Record(status=5), failed("b", status=None)],
    ids=["not-run", "skipped", "none-run", "broke-off"],
)
def test_a_repeat_counts_only_if_every_test_passed_in_it(again: Record) -> None:
    assert not Runs(failed("a", "b"), again, passed("a", "b"), passed("a", "b")).judged()


@pytest.mark.parametrize(
    "first",
    [
        failed(*"abcdef"),
        failed("a", status=None),
        failed("a", broken=["worker gw0 crashed"]),
        failed("a", status=3),
        Record({"passes": "passed"}, status=1),
        Record({"passes": "passed"}, broken=["a file"], status=0),
    ],
    ids=["six", "broke-off", "crashed", "internal-error", "without-a-test", "broken"],
)
def test_other_failures_stand_without_a_repeat(first: Record) -> None:
    runs = Runs(first)
    assert not runs.judged()
    assert runs.asked == [[]]
    assert "not repeated" in runs.said


def test_five_failures_are_repeated() -> None:
    assert Runs(failed(*"abcde"), *[passed(*"abcde")] * 3).judged()


def test_a_real_suite_with_a_flaky_test_succeeds_and_shows_its_first_failure(toy: Toy) -> None:
    toy.write("test_one.py", FAILS_ONCE + "def test_good(): pass\n")
    done = toy.run("-n", "2", before=REPEAT)
    assert done.returncode == 0, done.stdout
    shown = done.stdout.split("======== flaky: test_one.py::test_first")[1]
    assert "assert 0 >= 1" in shown and "what the first failure printed" in shown
    assert (toy.directory / "test_one.seen").read_text() == "xxxx"  # once among all, three times alone


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("test_broken.py", "import no_such_module"),
        ("test_ends.py", "import os\ndef test_ends(): os._exit(1)"),
    ],
    ids=["cannot-be-collected", "ends-the-process"],
)
def test_a_run_that_breaks_is_not_repeated(toy: Toy, name: str, text: str, workers: str) -> None:
    toy.write(name, text)
    toy.write("test_one.py", FAILS_ONCE)
    done = toy.run("-n", workers, before=REPEAT)
    assert done.returncode == 1, done.stdout
    assert "not repeated: the run" in done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("error", ["SystemError", "pytest.fail.Exception"])
def test_a_failure_that_cannot_be_formatted_at_first_does_not_end_the_run(tmp_path: Path, error: str) -> None:
    toy = Toy(tmp_path)
    toy.write(
        "conftest.py",
        f"""
        import pytest
        from _pytest._code import source

        class Ast:
            broken = False
            def __getattr__(self, name):
                if name == "parse" and not Ast.broken:
                    Ast.broken = True
                    raise {error}("not now")
                return getattr(real, name)

        real, source.ast = source.ast, Ast()
    """,
    )
    toy.write("test_toy.py", "def test_first():\n    assert 1 == 2\ndef test_second(): pass\n")
    done = toy.run()
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "assert 1 == 2" in done.stdout
