"""Ports that are chosen before a server listens on them are unique on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from support.ports import BLOCK, FIRST, LAST, free_port

ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
CHOOSE = "from support.ports import free_port; print(*(free_port() for _ in range(150)), flush=True); input()"


@pytest.mark.skipif(sys.platform != "linux", reason="reservations are names of Linux's abstract sockets")
def test_processes_that_choose_ports_at_the_same_time_never_choose_one_twice() -> None:
    command = [sys.executable, "-c", CHOOSE]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ENVIRON}
    children = [subprocess.Popen(command, **pipes) for _ in range(3)]
    try:
        found = [int(port) for child in children for port in child.stdout.readline().split()]  # type: ignore[union-attr]
    finally:
        for child in children:
            child.communicate("\n")
    found += [free_port() for _ in range(150)]
    assert len(set(found)) == len(found) == 600
    assert all(FIRST <= port < LAST for port in found)


def test_several_ports_in_a_row_are_chosen_together() -> None:
    firsts = [free_port(3) for _ in range(40)]
    taken = [port for first in firsts for port in range(first, first + 3)]
    assert len(set(taken)) == len(taken)
    with pytest.raises(OSError, match="in a row"):
        free_port(BLOCK + 1)
