"""The pages for new users: their blocks are executed in order, and every output shown is compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.docs.blocks import start_blocks
from support.docs.walk import Walk, path_with
from support.postgres import EmbeddedPostgres
from tidemill.spark.session.java import ensure_spark_home, find_java

INSTALLING = "install"
"""Its commands are run by `./dev quickstart`."""


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.browser
def test_the_pages_for_new_users_do_what_they_show(postgres_server: EmbeddedPostgres, tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": path_with(), "JAVA_HOME": str(find_java().home)}
    if home := ensure_spark_home():
        environ["SPARK_HOME"] = home
    with Walk(tmp_path, postgres_server, environ) as walk:
        for block in start_blocks():
            if not block.not_run and block.page != INSTALLING:
                walk.run(block)
