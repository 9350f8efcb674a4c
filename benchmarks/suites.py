"""`./dev bench suites [NAME…] [--only TESTS]`: the clients' own tests, unmodified, against a node of `tidemill up`.
Prints what failed or was skipped, and why, then how many passed.

    kafka-python    integration tests of its source distribution (PyPI); --only as pytest's -k
    librdkafka      the tests in C and C++ within node-rdkafka (npm), compiled here; --only 0045,0081. With
                    TEST_CONSUMER_GROUP_PROTOCOL=consumer in the environment its groups are those of KIP-848
    franz-go        the tests of its client (Go's module proxy), compiled here; --only as go test's -run
    aiokafka        integration tests of a checkout of its repository, which AIOKAFKA_CHECKOUT in the environment
                    names: no registry carries them. Not run without; --only as pytest's -k

One fresh node for each suite. A test that fails is repeated alone, and counts if it passes then: the suites were
written for a dedicated machine. Fewer passes than a suite's floor are an error. docs/reference/kafka.md explains each
test that fails.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from suites_aiokafka import aiokafka
from suites_c import librdkafka
from suites_go import franz_go
from suites_node import NotHere, Outcome
from suites_python import kafka_python


class Suite(NamedTuple):
    run: Callable[[Path, str], list[Outcome]]
    floor: int
    """Minimum number of tests that must pass."""


SUITES: Final = {
    "kafka-python": Suite(kafka_python, 52),
    "librdkafka": Suite(librdkafka, 80),
    "franz-go": Suite(franz_go, 142),
    "aiokafka": Suite(aiokafka, 207),
}


def reported(name: str, found: list[Outcome]) -> str:
    """Return the tests that did not pass, line by line, and the sums."""
    lines = [f"{verdict:8}{test}  {why}".rstrip() for test, verdict, why in found if verdict != "passed"]
    counts = Counter(outcome.verdict for outcome in found)
    sums = f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    return "\n".join([*lines, sums])


def passed(found: list[Outcome]) -> int:
    return sum(outcome.verdict == "passed" for outcome in found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench suites", description=__doc__, allow_abbrev=False)
    parser.add_argument("suite", nargs="*", choices=[*SUITES, []], default=list(SUITES))
    parser.add_argument("--only", default="", help="some of a suite's tests, without a floor")
    parser.add_argument("--keep", type=Path, help="an empty directory for logs and data, which stay")
    given = parser.parse_args()
    code = 0
    for name in given.suite:
        began_s = time.monotonic()
        try:
            if given.keep:
                found = SUITES[name].run(given.keep, given.only)
            else:
                with tempfile.TemporaryDirectory(prefix="tidemill-suite-", ignore_cleanup_errors=True) as scratch:
                    found = SUITES[name].run(Path(scratch), given.only)
        except NotHere as error:
            print(f"{name}: not run: {error}", flush=True)
            code = 1
            continue
        print(reported(name, found), f"in {time.monotonic() - began_s:.0f} s", flush=True)
        if not given.only and passed(found) < SUITES[name].floor:
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
