"""kafka-python's integration tests, from its source distribution: the release that requirements.lock names, checked by
the hash there. Its tests of TLS and SASL start their own Kafka and are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from suites_node import AS_KAFKA, NotHere, Outcome, node

ROOT: Final = Path(__file__).parents[1]
OWN_BROKER: Final = ("test_sasl_integration.py", "test_ssl_integration.py")
TEST_TIMEOUT_S: Final = 60
SERVICE: Final = """
class ExternalService:
    def __init__(self, host, port): ...
    def open(self): ...
    def stop(self): ...

class SpawnedService: ...
"""
"""A broker that runs already."""


def kafka_python(scratch: Path, only: str = "") -> list[Outcome]:
    """Run every test, and repeat each failed test alone. `only` as pytest's -k."""
    root = _fetched(scratch)
    with node(scratch / "node") as address:
        environment = {**os.environ, "KAFKA_VERSION": AS_KAFKA, "KAFKA_URI": f"kafka://{address}", "PYTHONPATH": "."}
        environment["KAFKA_ROOT"] = str(root)
        options = [f"--ignore-glob=*{name}" for name in OWN_BROKER]
        found = run_pytest(root, environment, [*options, "test/integration", *(["-k", only] if only else [])])
        again = [test for test, outcome in found.items() if outcome.verdict == "failed"]
        if again:
            found |= run_pytest(root, environment, again)
    return list(found.values())


def _fetched(scratch: Path) -> Path:
    lock = (ROOT / "requirements.lock").read_text()
    pinned = re.search(r"^kafka-python==[^\n]*\\\n(?: +--hash=[^\n]*\n)+", lock, re.M)
    assert pinned is not None, "kafka-python is not in requirements.lock"
    (scratch / "kafka-python.txt").write_text(pinned[0])
    fetch = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
    fetch += ["--require-hashes", "-r", "kafka-python.txt"]
    done = subprocess.run([sys.executable, "-m", "pip", *fetch], cwd=scratch, capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"kafka-python's source distribution was not to be had: {done.stderr[-500:]}")
    with tarfile.open(next(scratch.glob("kafka_python-*.tar.gz"))) as archive:
        archive.extractall(scratch, filter="data")
        root = scratch / archive.getnames()[0].split("/")[0]
    # Two files that the distribution leaves out, of its `test*.py` not: without the one Python's own package `test` is
    # found, the other starts brokers.
    (root / "test/__init__.py").touch()
    (root / "test/service.py").write_text(SERVICE)
    return root


def run_pytest(root: Path, environment: dict[str, str], chosen: Sequence[str]) -> dict[str, Outcome]:
    """Return the outcomes of the chosen tests, which are in `root`, by id. `chosen`: options, files and ids."""
    report = root / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal", *chosen]
    with (root / "pytest.log").open("ab") as log:
        subprocess.run(command, cwd=root, env=environment, stdout=log, stderr=log)
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        path, name = (case.get("classname") or "").split("."), case.get("name", "")
        file = next(n for n, part in enumerate(path) if part.startswith("test_")) + 1
        test = "::".join(["/".join(path[:file]) + ".py", *path[file:], name])
        found[test] = Outcome(test, "passed")
        for kind, verdict in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            reported = case.find(kind)
            if reported is not None:
                found[test] = Outcome(test, verdict, (reported.get("message") or "").partition("\n")[0][:160])
                break
    return found
