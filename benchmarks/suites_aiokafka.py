"""aiokafka's integration tests, from a checkout of its repository: no registry carries them. `AIOKAFKA_CHECKOUT` names
the checkout, of the release that requirements.lock names; the client under test is the installed one.

The suite starts its broker with Docker. A module of that name stands in for it, and starts a node at the port that the
suite chose. Tests of SASL, TLS and Kerberos need the listeners of that image and are left out.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Final

from suites_node import AS_KAFKA, NotHere, Outcome
from suites_python import run_pytest

CHECKOUT: Final = "AIOKAFKA_CHECKOUT"
FILES: Final = (
    *("admin", "client", "conn", "consumer", "coordinator", "pep492", "producer", "sender"),
    *("transactional_consumer", "transactional_producer"),
)
"""Files of tests/test_*.py with tests that need a broker."""
DOCKER: Final = """
import os, tempfile
from pathlib import Path
from types import SimpleNamespace

from suites_node import node


class Container:
    def __init__(self, port, partitions):
        scratch = Path(tempfile.mkdtemp(prefix="node-", dir=os.environ["SUITE_SCRATCH"]))
        self._node = node(scratch / "node", port=port, partitions=partitions)
        self._node.__enter__()

    def stop(self):
        self._node.__exit__(None, None, None)


def _run(*, environment, **_):
    return Container(environment["ADVERTISED_PORT"], environment["NUM_PARTITIONS"])


def from_env():
    return SimpleNamespace(containers=SimpleNamespace(run=_run), close=lambda: None)


models = SimpleNamespace(containers=SimpleNamespace(Container=Container))
"""
INI: Final = "[pytest]\nmarkers = ssl: needs certificates\n"


def aiokafka(scratch: Path, only: str = "") -> list[Outcome]:
    """Run every test, and repeat each failed test alone. `only` as pytest's -k."""
    root = _laid_out(scratch)
    path = f"{root / 'stand-ins'}{os.pathsep}{Path(__file__).parent}{os.pathsep}{root}"
    environment = {**os.environ, "PYTHONPATH": path, "SUITE_SCRATCH": str(scratch)}
    environment["PATH"] = f"{root / 'stand-ins'}{os.pathsep}{os.environ['PATH']}"
    options = ["-c", "suite.ini", "-m", "not ssl", "--no-pull", f"--docker-image=aiokafka:{AS_KAFKA}"]
    files = [f"tests/test_{name}.py" for name in FILES]
    found = run_pytest(root, environment, [*options, *files, *(["-k", only] if only else [])])
    again = [test for test, outcome in found.items() if outcome.verdict == "failed"]
    if again:
        found |= run_pytest(root, environment, [*options, *again])
    return list(found.values())


def _laid_out(scratch: Path) -> Path:
    """Lay out the tests without the client, with stand-ins for Docker and for Kerberos' ktutil."""
    checkout = Path(os.environ.get(CHECKOUT, "")).absolute()
    if CHECKOUT not in os.environ or not (checkout / "tests/conftest.py").is_file():
        raise NotHere(f"no registry carries its tests: name a checkout of its repository in {CHECKOUT}")
    released = re.search(r'^__version__ = "(.+)"', (checkout / "aiokafka/__init__.py").read_text(), re.M)
    if released is None or released[1] != version("aiokafka"):
        raise NotHere(f"the checkout is of another release: check out v{version('aiokafka')}")
    root = scratch / "aiokafka"
    shutil.copytree(checkout / "tests", root / "tests")
    (root / "tests/ssl_cert").mkdir()
    (root / "suite.ini").write_text(INI)
    (root / "stand-ins/docker").mkdir(parents=True)
    (root / "stand-ins/docker/__init__.py").write_text(DOCKER)
    (root / "stand-ins/ktutil").write_text("#!/bin/sh\nexit 0\n")
    (root / "stand-ins/ktutil").chmod(0o755)
    return root
