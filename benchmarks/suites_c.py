"""librdkafka's own tests in C and C++, from npm's node-rdkafka (tests/clients), built here, in its quick mode. Tests
that need no broker, or that their authors expect to fail, are left out.

A failed test ends its thread. A test that hangs or asserts ends the whole process, and the tests without a verdict are
run again. Tests that failed while others ran are repeated alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from suites_node import AS_KAFKA, NotHere, Outcome, node
from suites_tools import install

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "tests/clients/node_modules/node-rdkafka"
BUILT: Final = ROOT / ".venv/suites"
"""Directory of the compiled tests, which survives with the environment: compiling takes longer than the tests."""
TOGETHER: Final = 6
RUN_TIMEOUT_S: Final = 400

RULES: Final = ("topic:*", "group:*", "transactional_id:*", "cluster")
"""Rules that grant everything to everybody, for tests that deny a part of it: a super user could not be denied
anything.
"""
_DENYING: Final = ("0109", "0115", "0119")

_VERDICT: Final = re.compile(r"=+ Test (\w+) (PASSED|FAILED|SKIPPED) =+")
_STARTED: Final = re.compile(r"=+ Running test (\w+) =+")
_FAILURE: Final = re.compile(r'### Test "(\w+)[^"]*" failed at [^\n]*\n([^\n]*)')
_BREAKING: Final = re.compile(r"_TEST\((\w+),\s*TEST_F_SOCKEM")
"""Tests that close sockets of the client by their number: never run with others in one process."""
_MOCKED: Final = ("0139", "0150")
"""Tests against librdkafka's own mock that are not marked as local."""
_DEFAULT: Final = ("-L", "-K", "-Q", "-S")
"""No local tests, none with a known issue, quick, no table at the end."""


def librdkafka(scratch: Path, only: str = "") -> list[Outcome]:
    """Every test that needs a broker; `only`: the numbers of some, 0045,0081."""
    tests = _built() / "tests"
    numbers = sorted({path.name[:4] for path in tests.glob("0[0-9][0-9][0-9]-*.c*")} - set(_MOCKED))
    chosen = [number for number in numbers if number in only.split(",")] if only else numbers
    breaking = [name for name in _BREAKING.findall((tests / "test.c").read_text()) if name[:4] in chosen]
    denying = [number for number in _DENYING if number in chosen]
    with ExitStack() as nodes, ThreadPoolExecutor(4) as pool:
        conf = nodes.enter_context(_node(scratch / "open", ()))
        ruled = nodes.enter_context(_node(scratch / "ruled", RULES)) if denying else conf
        at = dict.fromkeys(chosen, conf) | dict.fromkeys(denying, ruled)
        most = [number for number in chosen if number not in denying]
        runs = [pool.submit(_together, tests, conf, most), pool.submit(_together, tests, ruled, denying)]
        runs += [pool.submit(_alone, tests, conf, name) for name in breaking]
        found: dict[str, Outcome] = {}
        for run in runs:
            found |= run.result()
        for name in [name for name, outcome in found.items() if outcome.verdict == "failed"]:
            found |= _alone(tests, at[name[:4]], name)
    return [found[name] for name in sorted(found)]


@contextmanager
def _node(scratch: Path, rules: Sequence[str]) -> Iterator[Path]:
    """A running node; the suite's configuration for it."""
    install(scratch / "kafka")
    with node(scratch / "node", rules) as address:
        conf = scratch / "test.conf"
        conf.write_text(f"bootstrap.servers={address}\n")
        yield conf


def _together(tests: Path, conf: Path, numbers: Sequence[str]) -> dict[str, Outcome]:
    """Run the tests that do not disturb others."""
    found: dict[str, Outcome] = {}
    while numbers:
        more, cut = _run(tests, conf, [f"-p{TOGETHER}", "-E"], numbers)
        found |= more
        for name in cut:
            found |= _alone(tests, conf, name)
        numbers = [number for number in numbers if cut and number > max(cut)[:4]]
    return found


def _built() -> Path:
    """Compile the tests; return their directory."""
    source = PACKAGE / "deps/librdkafka"
    if not source.is_dir():
        raise NotHere("needs the packages of tests/clients: tests/clients/install")
    missing = [tool for tool in ("bash", "make", "gcc", "g++") if shutil.which(tool) is None]
    if missing:
        raise NotHere(f"librdkafka's tests are compiled, and there is no {', '.join(missing)}")
    version = re.search(r"RD_KAFKA_VERSION\s+0x(\w+)", (source / "src/rdkafka.h").read_text())
    assert version is not None
    root = BUILT / f"librdkafka-{version[1]}"
    if not (root / "built").exists():
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(source, root)
        with (root / "build.log").open("wb") as log:
            for command in (
                ["bash", "configure", "--disable-optimization", "--disable-debug-symbols", "--disable-gssapi"],
                ["make", "-j2", "libs"],
                ["make", "-j2", "-C", "tests", "build"],
            ):
                if subprocess.run(command, cwd=root, stdout=log, stderr=log).returncode:
                    raise RuntimeError(f"{command}: {(root / 'build.log').read_text(errors='replace')[-3000:]}")
        (root / "built").touch()
    return root


def _alone(tests: Path, conf: Path, name: str) -> dict[str, Outcome]:
    found, cut = _run(tests, conf, ["-p1"], [name[:4]])
    return {name: found[name]} if name in found else {name: Outcome(name, "failed", f"cut off with {', '.join(cut)}")}


def _run(tests: Path, conf: Path, options: list[str], numbers: Sequence[str]) -> tuple[dict[str, Outcome], list[str]]:
    """(what had a verdict by name, what was running when the process ended)."""
    environment = {
        **os.environ,
        "TESTS": ",".join(numbers),
        "RDKAFKA_TEST_CONF": str(conf),
        "TEST_KAFKA_VERSION": AS_KAFKA,
        "CI": "true",
    }
    environment |= {"KAFKA_PATH": str(conf.parent / "kafka"), "BROKERS": conf.read_text().partition("=")[2].strip()}
    environment["LD_LIBRARY_PATH"] = f"{tests.parent}/src:{tests.parent}/src-cpp"
    with tempfile.NamedTemporaryFile("wb", dir=conf.parent, prefix="tests-", suffix=".log", delete=False) as log:
        running = subprocess.Popen(
            ["./test-runner", *options, *_DEFAULT], cwd=tests, env=environment, stdout=log, stderr=log
        )
        try:
            running.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
    text = Path(log.name).read_text(errors="replace")
    found = {name: Outcome(name, verdict.lower()) for name, verdict in _VERDICT.findall(text)}
    found |= {name: Outcome(name, "failed", why[:160]) for name, why in _FAILURE.findall(text)}
    return found, sorted(set(_STARTED.findall(text)) - set(found))
