"""`--quick` omits tests that start processes and fails those that do so undetected; extended tests run on request."""

from __future__ import annotations

import pytest
from toy import Toy

HELPERS = """
import subprocess, sys
class Child:
    def __init__(self):
        subprocess.run([sys.executable, "-c", ""], check=True)
class Grown(Child):
    pass
def plain():
    return 1
"""

CASES = {
    "its own code": "import subprocess, sys\ndef test_it(): subprocess.run([sys.executable, '-c', ''])",
    "an import within": "def test_it():\n    from subprocess import run\n    run(['true'])",
    "a helper's class": "from helpers import Child\ndef test_it(): Child()",
    "a base class": "from helpers import Grown\ndef test_it(): Grown()",
    "a helper through its module": "import helpers\ndef test_it(): helpers.Child()",
    "a function within": "from helpers import Child\ndef test_it():\n    def inner(): Child()\n    inner()",
    "a fixture of a fixture": """
import pytest
from helpers import Child
@pytest.fixture
def child(): return Child()
@pytest.fixture
def other(child): return child
def test_it(other): pass
""",
    "a method": """
from helpers import Child
class TestIt:
    def make(self): Child()
    def test_it(self): self.make()
""",
    "the loop": "import asyncio\ndef test_it(): asyncio.run(asyncio.create_subprocess_exec('true'))",
    "the product's class": "from tidemill.node.supervise.supervisor import Child\ndef test_it(): Child",
    "a generated example": """
from hypothesis import given, strategies as st
from helpers import Child
@given(st.just(1))
def test_it(n): Child()
""",
}


PLAIN = """
import helpers
from helpers import plain
def test_a(): plain()
def test_b(): helpers.plain()
"""

WAYS = (
    "__import__('sub' + 'process').run(['true'])",
    "getattr(os, 'po' + 'six_spawn')('/bin/true', ['true'], {})",
    "getattr(os, 'fo' + 'rk')()",
    "os.system('true')",
    "getattr(__import__('multi' + 'processing'), 'get_context')('spawn').Process(target=print).start()",
)

SLOW = """
import time
import pytest

@pytest.mark.parametrize("s", [0, 1])
def test_works(s):
    until_s = time.process_time() + s
    while time.process_time() < until_s:
        pass

def test_waits(): time.sleep(2)
def test_fast(): pass
"""

PROPERTIES = """
import atexit
from collections import Counter
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

seen = Counter()
atexit.register(lambda: print(*(f"{name}={count}" for name, count in seen.items())))

@settings(max_examples=300)
@given(st.integers())
def test_asked(n): seen["asked"] += 1

@given(st.integers())
def test_open(n): seen["open"] += 1

class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self): seen["machine"] += 1
    @rule()
    def step(self): pass

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=300)
"""

EXTENDED = """
import pytest
@pytest.mark.extended
def test_long(): pass
@pytest.mark.extended
@pytest.mark.parametrize("n", [1, 2])
def test_n(n): pass
def test_short(): pass
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of a quick collection of the cases above and of three tests that start nothing."""
    toy = Toy(tmp_path_factory.mktemp("cases"))
    toy.write("helpers.py", HELPERS)
    for number, text in enumerate(CASES.values()):
        toy.write(f"test_case_{number}.py", text)
    toy.write("test_plain.py", PLAIN)
    toy.write("test_marked.py", "import pytest\n@pytest.mark.processes\ndef test_c(): pass\n")
    return toy.run("--quick", "--collect-only").stdout


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_a_test_that_starts_a_process_by_any_way_is_not_quick(quick: str, number: int) -> None:
    assert f"test_case_{number}.py" not in quick


def test_a_test_that_starts_nothing_is_quick_and_a_marked_one_is_not(quick: str) -> None:
    assert "test_plain.py::test_a" in quick and "test_plain.py::test_b" in quick
    assert "test_marked.py" not in quick


def test_a_quick_test_that_starts_a_process_unseen_fails_though_the_error_is_swallowed(toy: Toy) -> None:
    tests = [f"def test_{n}():\n    try:\n        {way}\n    except Exception: pass\n" for n, way in enumerate(WAYS)]
    toy.write("test_one.py", "import os\n" + "\n".join(tests) + "\ndef test_good(): pass\n")
    done = toy.run("--quick")
    assert f"{len(WAYS)} error" in done.stdout or f"{len(WAYS)} failed" in done.stdout, done.stdout
    assert "mark it with pytest.mark.processes" in done.stdout


def test_a_quick_property_test_tries_at_most_ten_examples_whatever_it_asks_for(toy: Toy) -> None:
    toy.write("test_one.py", PROPERTIES)
    done = toy.run("--quick", "-s")
    assert "3 passed" in done.stdout, done.stdout
    found = dict(word.split("=") for word in done.stdout.split() if "=" in word and word[0] in "amo")
    assert 1 <= int(found["asked"]) <= 10 and 1 <= int(found["open"]) <= 10 and 1 <= int(found["machine"]) <= 10


def test_slow_tests_are_measured_into_a_file_and_left_out_of_quick_runs_from_then_on(toy: Toy) -> None:
    toy.write("test_one.py", SLOW)
    assert "4 passed" in toy.run("--quick", "--measure", "-n", "2").stdout
    found = (toy.directory / "tests/suite/slow.txt").read_text().splitlines()[1:]
    assert found == ["test_one.py::test_waits", "test_one.py::test_works[1]"]
    assert "2 passed, 2 deselected" in toy.run("--quick").stdout
    assert "4 passed" in toy.run().stdout


def test_an_extended_test_runs_when_asked_for_or_named(toy: Toy) -> None:
    toy.write("test_one.py", EXTENDED)
    assert "1 passed, 3 deselected" in toy.run().stdout
    assert "4 passed" in toy.run("--extended").stdout
    assert "3 passed" in toy.run("test_one.py::test_long", "test_one.py::test_n").stdout
