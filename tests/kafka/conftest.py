from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.kafka.foreign import SETTINGS, Driver
from support.kafka.harness import FakeBroker, RealBroker
from tidemill.kafka.schema import primitives


@pytest.fixture(autouse=True)
def _no_request_begun() -> None:
    """Reset the element budget. The last request of another test's broker must not limit messages that are decoded
    alone.
    """
    primitives._elements.left = 1 << 62


@pytest.fixture
def fake_broker() -> Iterator[FakeBroker]:
    broker = FakeBroker()
    yield broker
    broker.close()


@pytest.fixture(params=["memory", "local"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealBroker]:
    """The endpoint over the real topics, once in memory and once on a directory with SQLite."""
    if request.param == "memory":
        broker = RealBroker()
    else:
        broker = RealBroker(f"file://{tmp_path}/objects", f"sqlite://{tmp_path}/consensus.db")
    yield broker
    broker.close()


@pytest.fixture(scope="module")
def drivers() -> Iterator[Callable[[str], Driver]]:
    """Return one process per client, started on first use."""
    made: dict[str, Driver] = {}

    def driver(name: str) -> Driver:
        if name not in made:
            made[name] = Driver(name)
        return made[name]

    yield driver
    for one in made.values():
        one.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[RealBroker]:
    broker = RealBroker(settings=SETTINGS)
    yield broker
    broker.close()


@pytest.fixture
def connected(drivers: Callable[[str], Driver], shared: RealBroker) -> Callable[[str], Driver]:
    def driver(name: str) -> Driver:
        found = drivers(name)
        found("connect", bootstrap=shared.address)
        return found

    return driver
