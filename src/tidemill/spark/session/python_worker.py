"""Python interpreter that Spark runs for a session: it searches it for data sources, and runs their planners and tasks.

A session of `build_session` runs the driver's own interpreter. Any other runs the one that PYSPARK_PYTHON named when
its JVM was started, else `python3` on PATH, which need not have tidemill.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from tidemill.base.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BUILT_SETTING = "spark.tidemill.built"
"""Setting that marks a context that `build_session` created."""
PROBE_TIMEOUT_S = 60
FIX = (
    "Set PYSPARK_PYTHON to the Python that runs this program before the session is created"
    ' (`os.environ["PYSPARK_PYTHON"] = sys.executable`), or create the session with `tidemill.spark.build_session`.'
)


@contextmanager
def translate_missing_source() -> Iterator[None]:
    """Translate Spark's error that there is no data source `tidemill` to InvalidError."""
    try:
        yield
    except Exception as error:  # py4j's exception in a classic session, PySpark's under Connect
        if "[DATA_SOURCE_NOT_FOUND]" not in str(error):
            raise
        raise InvalidError('the Python that Spark runs has no data source "tidemill".', fix=FIX) from error


def check_session_python(spark: SparkSession) -> None:
    """Raise InvalidError if the session's Python cannot import the data source.

    Under Spark Connect it is the server's Python, which cannot be checked here. In a session of `build_session` the JVM
    makes any Python find our package, so it is not checked.
    """
    context = getattr(spark, "_sc", None)
    if context is not None and context.getConf().get(BUILT_SETTING):
        return
    python = shutil.which(context.pythonExec) if context is not None else None
    if python is not None and python != sys.executable and not _can_import(python):
        raise InvalidError(f"the Python that Spark runs has no tidemill: python={python}.", fix=FIX)


@lru_cache
def _can_import(python: str) -> bool:
    done = subprocess.run(
        [python, "-c", "import pyspark_tidemill; pyspark_tidemill.DefaultSource"],
        capture_output=True,
        timeout=PROBE_TIMEOUT_S,
        check=False,
    )
    return done.returncode == 0
