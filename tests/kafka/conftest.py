from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import FakeBroker, RealBroker

from tidemill.kafka.schema import wire


@pytest.fixture(autouse=True)
def _no_request_begun() -> None:
    """What another test's broker left of its last request does not count for messages that are decoded alone."""
    wire._elements.left = 1 << 62


@pytest.fixture
def fake_broker() -> Iterator[FakeBroker]:
    broker = FakeBroker()
    yield broker
    broker.close()


@pytest.fixture(params=["memory", "local"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealBroker]:
    """The endpoint over the real topics room, once in memory and once on a directory with SQLite."""
    if request.param == "memory":
        broker = RealBroker()
    else:
        broker = RealBroker(f"file://{tmp_path}/objects", f"sqlite://{tmp_path}/consensus.db")
    yield broker
    broker.close()
