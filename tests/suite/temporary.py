"""Delete the temporary directories of a run whose tests all passed, in a process for which nothing waits.

A whole run leaves some 300,000 files, most of them of PostgreSQL servers. Where the disk discards freed blocks
immediately, their deletion takes ten minutes, which pytest would spend before it ends. If the process is killed, the
next run deletes them: they have the name that pytest gives to directories that it is about to delete.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any

import pytest

DELETE = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    factory: Any = getattr(session.config, "_tmp_path_factory", None)
    if exitstatus != 0 or factory is None or factory._given_basetemp is not None or factory._basetemp is None:
        return
    garbage = factory._basetemp.with_name(f"garbage-{uuid.uuid4()}")
    factory._basetemp.rename(garbage)
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-c", DELETE, str(garbage)]
    subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
