"""Undo each test's changes to its process, and fail tests that leave such a change.

Checked: environment variables, the working directory, the level of the root logger, signal handlers. The garbage
collector's thresholds and frozen objects are restored silently, because a node sets them when it is assembled.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

OF_THE_SPARK_SESSION = ("SPARK_", "PYSPARK_", "PYTHONPATH", "JAVA_HOME")
"""Set for the one session of the run, which outlives the test that needs it first."""
OF_PYTEST = ("PYTEST_",)
OF_IMPORTS = ("_RJEM_MALLOC_CONF",)
"""Set by the import of Polars, in the test that needs it first."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before, collector = _state(), gc.get_threshold()
    yield
    if gc.get_threshold() != collector:
        gc.set_threshold(*collector)
    if gc.get_freeze_count():
        gc.unfreeze()
    after = _state()
    if after == before:
        return
    left = [f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)]  # fmt: skip
    _restore(before, after)
    pytest.fail(f"The test leaves a change of its process for the next one; undo it (monkeypatch does). left={left}")


def _state() -> dict[str, Any]:
    passed_over = (*OF_THE_SPARK_SESSION, *OF_PYTEST, *OF_IMPORTS)
    found: dict[str, Any] = {f"${k}": v for k, v in os.environ.items() if not k.startswith(passed_over)}
    found |= {number.name: signal.getsignal(number) for number in SIGNALS}
    return found | {"cwd": os.getcwd(), "log level": logging.root.level, "logs off": logging.root.manager.disable}


def _restore(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in after.keys() - before.keys():
        os.environ.pop(name[1:], None)
    for name, value in before.items():
        if after.get(name) != value and name.startswith("$"):
            os.environ[name[1:]] = value
    for number in SIGNALS:
        if signal.getsignal(number) is not before[number.name]:
            signal.signal(number, before[number.name])
    os.chdir(before["cwd"])
    logging.root.setLevel(before["log level"])
    logging.disable(before["logs off"])
