"""Options of the suite: which tests run and in which order.

`--quick` leaves out the tests that start processes and those that are slow (slow.py), and fails one that starts a
process nevertheless. Property tests try at most ten examples.
`--extended` includes the tests marked `extended`; a test named by its id always runs.
`--shuffle SEED` runs files, and the tests within each file, in random order.
Tests that start processes have the marker `processes`: `-m processes` runs only those.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from suite.examples import few_examples
from suite.guard import Guard
from suite.slow import Meter
from suite.slow import named as names_of_slow_tests
from suite.starts import Reader


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--quick", action="store_true", help="only tests that start no process")
    group.addoption("--measure", action="store_true", help="with --quick: run the slow tests too, and list them anew")
    group.addoption("--extended", action="store_true", help="also the tests marked extended")
    group.addoption("--shuffle", type=int, metavar="SEED", help="random order of files and of the tests in each")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.quick:
        config.pluginmanager.register(Guard(), "suite-guard")
        if config.option.measure:
            config.pluginmanager.register(Meter(config.rootpath), "suite-meter")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Set marks before `-m` reads them, and shuffle after all other plugins."""
    reader = Reader(config.rootpath)
    for item in items:
        if reader.starts(item):
            item.add_marker("processes")
    _keep(config, items)
    if config.option.quick:
        few_examples(items)
    yield
    if config.option.shuffle is not None:
        shuffle(items, config.option.shuffle)


def _keep(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: list[pytest.Item] = []
    kept: list[pytest.Item] = []
    slow = frozenset() if config.option.measure else names_of_slow_tests(config.rootpath)
    named = tuple(argument for argument in config.args if "::" in argument)
    for item in items:
        extended = item.get_closest_marker("extended") and not config.option.extended and not _is_named(item, named)
        not_quick = config.option.quick and (item.get_closest_marker("processes") or item.nodeid in slow)
        (left_out if extended or not_quick else kept).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def _is_named(item: pytest.Item, named: tuple[str, ...]) -> bool:
    return any(item.nodeid == name or item.nodeid.startswith((f"{name}[", f"{name}::")) for name in named)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Shuffle the tests. Each file's tests stay together, so that fixtures of a module are created once."""
    rand = random.Random(seed)
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    order = sorted(files)
    rand.shuffle(order)
    for name in order:
        rand.shuffle(files[name])
    items[:] = [item for name in order for item in files[name]]
