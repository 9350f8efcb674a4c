"""franz-go's own tests of its client, from the module proxy: the release that tests/clients/go/go.mod names, checked by
the hash in go.sum and compiled here. A test counts once, with all its subtests.

A test that fails is repeated alone; so is every test without a verdict when the process ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from suites_node import NotHere, Outcome, node

ROOT: Final = Path(__file__).parents[1]
MODULE: Final = ROOT / "tests/clients/go"
PACKAGE: Final = "github.com/twmb/franz-go/pkg/kgo"
BUILT: Final = ROOT / ".venv/suites/franz-go"
RECORDS: Final = "50000"
"""Records that go through each chain of groups, a tenth of the suite's default. KGO_TEST_RECORDS overrides it."""
INTERNAL_TOPIC: Final = ("Test848RegexBrokerResolves", "TestConsumeRegex")
"""These wait 45 s for the topic of offsets, which is not here: not run again."""
RUN_TIMEOUT_S: Final = 900
ALONE_TIMEOUT_S: Final = 180

_VERDICT: Final = re.compile(r"--- (PASS|FAIL|SKIP): (\w+) ")
_STARTED: Final = re.compile(r"=== RUN +(\w+)$")
_REASON: Final = re.compile(r" +(\w+_test\.go:\d+: (?!FAILED TESTING|deleting|Test\w+/).*)")
_FLOOD: Final = "testConsumer sendErr"
"""Millions of lines, once a chain has failed."""
_VERDICTS: Final = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}


def franz_go(scratch: Path, only: str = "") -> list[Outcome]:
    """Run every test, and repeat each failed test alone. `only` as go test's -run."""
    binary = _built()
    with node(scratch / "node") as address:
        environment = {"KGO_TEST_RECORDS": RECORDS, **os.environ}
        environment |= {"KGO_SEEDS": address, "KGO_TEST_RF": "1", "KGO_LOG_LEVEL": "none"}
        found = _run(binary, scratch, environment, only or ".", RUN_TIMEOUT_S)
        for test in [
            test for test, outcome in found.items() if outcome.verdict == "failed" and test not in INTERNAL_TOPIC
        ]:
            found |= _run(binary, scratch, environment, f"^{test}$", ALONE_TIMEOUT_S)
    return list(found.values())


def _built() -> Path:
    """The compiled tests of the pinned release."""
    if shutil.which("go") is None:
        raise NotHere("franz-go's tests are compiled, and there is no go")
    pinned = re.search(r"github\.com/twmb/franz-go (v\S+)", (MODULE / "go.mod").read_text())
    assert pinned is not None, "franz-go is not in tests/clients/go/go.mod"
    binary = BUILT / f"{pinned[1]}.test"
    if not binary.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        command = ["go", "test", "-c", "-o", str(binary), PACKAGE]
        done = subprocess.run(command, cwd=MODULE, capture_output=True, text=True)
        if done.returncode:
            raise NotHere(f"franz-go's tests could not be compiled: {done.stderr[-500:]}")
    return binary


def _run(binary: Path, scratch: Path, environment: dict[str, str], tests: str, within_s: int) -> dict[str, Outcome]:
    """Return the outcomes of the tests that match, by name."""
    where = ["go", "list", "-f", "{{.Dir}}", PACKAGE]  # a test reads a file of its package
    folder = subprocess.run(where, cwd=MODULE, check=True, capture_output=True, text=True).stdout.strip()
    command = [str(binary), "-test.v", f"-test.run={tests}", f"-test.timeout={within_s}s"]
    found: dict[str, Outcome] = {}
    reason = ""
    with (
        (scratch / "go.log").open("a") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            if _FLOOD in line:
                continue
            log.write(line)
            if started := _STARTED.match(line):
                found[started[1]] = Outcome(started[1], "failed", "cut off")
            elif because := _REASON.match(line):
                reason = because[1]
            elif verdict := _VERDICT.match(line):
                why = "" if verdict[1] == "PASS" else reason[:160]
                found[verdict[2]] = Outcome(verdict[2], _VERDICTS[verdict[1]], why)
                reason = ""
    return found
