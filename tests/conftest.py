"""Fixtures that every room shares: one real PostgreSQL per worker process, one database per test."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
import pytest
import structlog
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support.postgres import EmbeddedPostgres  # noqa: E402
from support.replication_slots import drop_slots  # noqa: E402
from support.waiting import run  # noqa: E402

pytest_plugins = ("suite.selection", "suite.recording", "suite.leftovers", "suite.temporary")

_numbers = itertools.count(1)

# The machine decides how long an example takes: the first one also loads the modules that it uses.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on its own loop, within the time limit of a scenario."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Restore the logging configuration, which a command run in this process may change."""
    before = structlog.get_config() if structlog.is_configured() else None
    yield
    if before is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**before)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A running PostgreSQL 18 with wal_level=logical; fsync is off, since no test cuts its power."""
    data_dir = tmp_path_factory.mktemp("postgres") / "data"
    server = EmbeddedPostgres(data_dir, settings={"fsync": "off", "shared_buffers": "32MB"})
    with server:
        yield server


@pytest.fixture
def new_database(postgres_server: EmbeddedPostgres) -> Callable[[], str]:
    """Call it for the DSN of a fresh, empty database."""

    def create() -> str:
        name = f"test_{next(_numbers)}"
        with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return postgres_server.dsn_for(name)

    return create


@pytest.fixture
def postgres_dsn(new_database: Callable[[], str]) -> Iterator[str]:
    """The DSN of a separate database for one test. Slots that the test leaves there are dropped: their names are global
    to the server.
    """
    dsn = new_database()
    yield dsn
    drop_slots(dsn)


REAL_CLIENT_MARKERS = ("node", "java", "go", "browser", "kcat", "spark", "postgres", "lake")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Turn a skip of a real-client test into a failure where TIDEMILL_REQUIRE_REAL=1 is set, as in CI."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    required = os.environ.get("TIDEMILL_REQUIRE_REAL") == "1"
    if required and report.skipped and any(item.get_closest_marker(name) for name in REAL_CLIENT_MARKERS):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing real may be skipped: {report.longrepr}"


SHARED: Final = {"tests/spark/": "spark", "tests/e2e/": "e2e", "tests/lake/": "lake"}
"""Folders whose tests all go to one worker: there is one Spark session per run, two demos never run concurrently, and
foreign readers start once. Other tests are distributed by file, so that a module's fixtures are made once.
"""


ORDER: Final = (
    "tests/spark/",
    "tests/e2e/",
    "tests/node/",
    "tests/faults/",
    "tests/kafka/",
    "tests/lake/",
    "tests/sim/",
    "tests/capture/",
    "tests/metastore/",
    "tests/shapes/",
)
"""Folders with long tests come first, so that at the end of a run no worker waits for one of them."""


def _rank(item: pytest.Item) -> int:
    return next((rank for rank, folder in enumerate(ORDER) if item.nodeid.startswith(folder)), len(ORDER))


def _holds(item: pytest.Item) -> bool:
    """False for a test of a newer PostgreSQL than the one that it is parametrized with."""
    since, call = item.get_closest_marker("since"), getattr(item, "callspec", None)
    version = call.params.get("postgres_server") if call is not None else None
    return since is None or version is None or int(version) >= since.args[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    older = [item for item in items if not _holds(item)]
    config.hook.pytest_deselected(items=older)
    items[:] = sorted((item for item in items if item not in older), key=_rank)
    for item in items:
        if item.get_closest_marker("spark") and not item.nodeid.startswith(tuple(SHARED)):
            raise pytest.UsageError(f"a test marked spark lives elsewhere than in {', '.join(SHARED)}: {item.nodeid}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by path. The group marks of xdist would have to rename tests, which pytest 9 does not allow."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc, no-any-unimported, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            shared = next((scope for folder, scope in SHARED.items() if nodeid.startswith(folder)), "")
            return shared or nodeid.split("::")[0]

    return Scheduling(config, log)
