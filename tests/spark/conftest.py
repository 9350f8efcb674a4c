from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def harbour(tmp_path: Path) -> Iterator[Any]:
    from support.spark.harbour import Harbour

    found = Harbour(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run one JVM for the whole test process. The data source is not registered explicitly: Spark finds it."""
    from support.spark.connector import EXTRA
    from tidemill.spark.session.session import build_session

    scratch = tmp_path_factory.mktemp("spark")
    # Workers import the tests of this folder, the helpers, and tidemill, by the same path.
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    session = build_session("tests", "local[2]", scratch=scratch, extra=EXTRA)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
