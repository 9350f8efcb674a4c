"""Foreign readers that all tests of the folder share: Spark alone takes half a minute of a busy machine to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.lake.readers import READERS, ForeignReader

OpenReader = Callable[[str], ForeignReader]


@pytest.fixture(scope="session")
def open_reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenReader]:
    """Call it with a name for the process of that reader."""
    started: dict[str, ForeignReader] = {}

    def opened(name: str) -> ForeignReader:
        if name not in started:
            started[name] = ForeignReader(name, tmp_path_factory.mktemp(name))
        return started[name]

    yield opened
    for each in started.values():
        each.close()


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, open_reader: OpenReader) -> ForeignReader:
    return open_reader(request.param)
