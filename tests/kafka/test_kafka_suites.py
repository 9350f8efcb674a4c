"""The clients' own test suites, unmodified, against a node: at least the documented number of tests passes.

docs/reference/kafka.md explains the others.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from suites import SUITES, passed, reported
from suites_node import NotHere, Outcome

MARKS = {"librdkafka": pytest.mark.node, "franz-go": pytest.mark.go}


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SUITES])
@pytest.mark.processes
def test_a_clients_own_suite_passes_but_for_what_is_written_down(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = SUITES[name]
    monkeypatch.setenv("KGO_TEST_RECORDS", "2500")  # franz-go: chains a twentieth as long as in `./dev bench suites`
    try:
        found = suite.run(tmp_path, "")
    except NotHere as error:
        pytest.skip(f"{name}: {error}")
    warnings.warn(reported(name, found), stacklevel=1)
    assert passed(found) >= suite.floor, reported(name, found)


def test_the_floors_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/kafka.md").read_text()
    for name, suite in SUITES.items():
        assert re.search(rf"^\| {name}, .*\| {suite.floor} of \d+ \|$", text, re.M), name


def test_what_a_suite_misses_is_told_by_name() -> None:
    found = [Outcome("a", "passed"), Outcome("b", "failed", "no such thing"), Outcome("c", "skipped")]
    assert reported("some", found) == "failed  b  no such thing\nskipped c\nsome: 1 passed, 1 failed, 1 skipped"
    assert passed(found) == 1
