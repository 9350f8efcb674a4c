"""Runs a test command, and repeats the few tests that failed: `.ci/run` is its only user.

    python tests/suite/repeat_failed.py COMMAND [ARGUMENTS]

COMMAND starts pytest and passes its arguments on. When at most five tests failed, exactly these run three more times,
alone and in one process. The exit status is 0 only if all of these runs pass. Each test that failed once and passed
then is printed under the heading "flaky" with its first failure's output. A run that broke off, a file that cannot be
collected, and more than five failures are never repeated.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.recording import Record, read

MOST_FAILED = 5
TIMES = 3
TESTS_FAILED = 1
"""Exit status of pytest when tests ran and some failed; every other one except 0 means that the run itself failed."""

Run = Callable[[Sequence[str]], Record]
"""Runs the command with additional arguments, and returns the outcomes of its tests."""


def why_not_repeated(first: Record) -> str | None:
    """Return the reason why this run's failure is final, or None if its failed tests may be repeated."""
    if first.status is None:
        return "the run ended before its last test"
    if first.broken:
        return f"the run broke: {first.broken[0]}"
    if first.status != TESTS_FAILED:
        return f"the run itself failed: exit_status={first.status}"
    if not first.failed:
        return "the run failed without a failed test"
    if len(first.failed) > MOST_FAILED:
        return f"too many tests failed to repeat them: failed={len(first.failed)} limit={MOST_FAILED}"
    return None


def passed_again(tests: Sequence[str], again: Record) -> bool:
    """Return whether every one of `tests` ran and passed, without another fault."""
    passed = {test for test, outcome in again.outcomes.items() if outcome == "passed"}
    return again.status == 0 and passed == set(tests) and not again.failed and not again.broken


def judge(run: Run, say: Callable[[str], None] = print) -> bool:
    first = run([])
    if first.status == 0 and not first.failed and not first.broken:
        return True
    refusal = why_not_repeated(first)
    if refusal is not None:
        say(f"not repeated: {refusal}")
        return False
    tests = list(first.failed)
    say(f"{len(tests)} failed; each runs {TIMES} more times, alone: {' '.join(tests)}")
    repeats = [run(["-n", "0", *tests]) for _ in range(TIMES)]
    good = [passed_again(tests, again) for again in repeats]
    for test in tests:
        count = sum(again.outcomes.get(test) == "passed" and test not in again.failed for again in repeats)
        heading = "flaky" if count == TIMES else "failed"
        say(f"\n======== {heading}: {test}  passed {count} of {TIMES} when repeated; its first failure:")
        say(first.failed[test])
    return all(good)


def main(command: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        numbers = iter(range(TIMES + 1))

        def run(more: Sequence[str]) -> Record:
            path = Path(directory) / f"{next(numbers)}.jsonl"
            status = subprocess.run([*command, f"--record={path}", *more], check=False).returncode
            found = read(path)
            if found.status is not None and found.status != status:
                found.status = None if status < 0 else status
            return found

        return 0 if judge(run, lambda text: print(text, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
