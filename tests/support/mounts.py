"""Commands of the system that need rights or programs which a machine may lack, such as `mount`."""

from __future__ import annotations

import subprocess

import pytest


def run_or_skip(*command: str) -> None:
    """Run the command. Skips the test if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as missing:
        pytest.skip(f"not installed: {missing.filename}")
    if done.returncode:
        pytest.skip(f"cannot {command[0]} here: {done.stderr.strip()}")
