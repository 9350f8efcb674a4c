"""The pages for new users: their blocks are executed in order, and every output shown is compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.docs.blocks import PAGES, start_blocks
from support.docs.walk import Walk, path_with
from support.postgres import EmbeddedPostgres
from tidemill.spark.session.java import ensure_spark_home, find_java

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.browser, pytest.mark.timeout(1800)]

TO_A_LIVE_PAGE = ("database", "live-page")


def walk_through(pages: Sequence[str], server: EmbeddedPostgres, directory: Path) -> None:
    environ = {**os.environ, "PATH": path_with(), "JAVA_HOME": str(find_java().home)}
    if home := ensure_spark_home():
        environ["SPARK_HOME"] = home
    with Walk(directory, server, environ) as walk:
        for block in start_blocks():
            if block.page in pages and not block.not_run:
                walk.run(block)


def test_what_init_writes_serves_a_table_to_a_browser(postgres_server: EmbeddedPostgres, tmp_path: Path) -> None:
    walk_through(TO_A_LIVE_PAGE, postgres_server, tmp_path)


@pytest.mark.extended
def test_the_pages_for_new_users_do_what_they_show(postgres_server: EmbeddedPostgres, tmp_path: Path) -> None:
    """All but the installation, which `./dev quickstart` executes, too."""
    walk_through(PAGES[1:], postgres_server, tmp_path)
