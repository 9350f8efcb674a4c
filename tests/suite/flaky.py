"""Runs the tests that start processes several times, in random order, on a busy machine: `./dev flaky`.

    ./dev flaky [N] [--seed SEED] [PYTEST ARGUMENTS]

N runs (3 unless given), while two other processes use a core each. Prints which tests failed, and in how many of how
many runs; the exit status is 1 if any did. Ctrl-C prints what is known so far. The same seed and arguments continue an
interrupted run with the tests that it had not reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.recording import Record, read

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".pytest_cache" / "flaky"
BURNERS = 2
RUNS = 3
PYTEST = (
    sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadscope", "--no-loadscope-reorder", "-m", "processes",
)  # fmt: skip
ENDS_WITHIN_S = 60.0
GOOD = {0, 5}
"""Exit statuses of pytest for a passed run, and for one in which every test was deselected because all had run
before."""

BURN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    for _ in range(1_000_000):
        pass
    if os.getppid() != int(sys.argv[1]):
        break
"""


@dataclass(frozen=True)
class Plan:
    runs: int
    seed: int
    arguments: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Directory for one seed and one list of arguments, so that only a run of the same tests is continued."""
        digest = hashlib.sha256("\0".join(self.arguments).encode()).hexdigest()[:8]
        return KEPT / f"{self.seed}-{digest}"


def parse(words: Sequence[str]) -> Plan:
    left = list(words)
    runs = int(left.pop(0)) if left and left[0].isdigit() else RUNS
    seed = random.SystemRandom().randrange(1_000_000)
    if "--seed" in left:
        at = left.index("--seed")
        seed = int(left[at + 1])
        del left[at : at + 2]
    return Plan(runs, seed, tuple(left))


@contextlib.contextmanager
def burners(count: int = BURNERS) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep processes busy for the duration of the block. They also end if this process is killed."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen([sys.executable, "-c", BURN, str(os.getpid())]))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def summary(records: Sequence[Record]) -> list[str]:
    """Return a line for each test that failed in a run, most frequent first, then the reasons of broken runs."""
    counts: dict[str, list[int]] = {}
    for record in records:
        for test in record.outcomes:
            failed, ran = counts.setdefault(test, [0, 0])
            counts[test] = [failed + (test in record.failed), ran + 1]
    failed = sorted(((failed, ran, test) for test, (failed, ran) in counts.items() if failed), reverse=True)
    lines = [f"failed in {failed} of {ran} runs: {test}" for failed, ran, test in failed]
    return lines + [f"broke a run: {text.splitlines()[0]}" for record in records for text in record.broken]


def _pytest(command: Sequence[str]) -> int:
    """Run pytest in a new session: a Ctrl-C reaches it once, from here, and no process that it started survives it."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)
        raise
    finally:
        if process.poll() not in GOOD:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(words: Sequence[str]) -> int:
    plan = parse(words)
    paths = [plan.directory / f"run-{number}.jsonl" for number in range(1, plan.runs + 1)]
    print(f"flaky: seed {plan.seed}; repeat or continue it with --seed {plan.seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    statuses: list[int] = []
    try:
        with burners():
            for number, path in enumerate(paths, 1):
                print(f"flaky: run {number} of {plan.runs}, outcomes in {path}", flush=True)
                options = [f"--shuffle={plan.seed + number}", f"--record={path}", "--continue-record"]
                statuses.append(_pytest([*PYTEST, *plan.arguments, *options]))
    except KeyboardInterrupt:
        print("flaky: interrupted", flush=True)
    records = [read(path) for path in paths]
    lines = summary(records)
    for line in lines:
        print(f"flaky: {line}")
    ran = max((len(record.outcomes) for record in records), default=0)
    print(f"flaky: {ran} tests, {len(statuses)} of {plan.runs} runs ended, seed {plan.seed}: {len(lines)} failed")
    clean = len(statuses) == plan.runs and not lines and all(status in GOOD for status in statuses)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
