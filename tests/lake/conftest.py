"""Foreign readers that all tests of the folder share: Spark alone takes half a minute of a busy machine to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.lake.readers import READERS, WITHOUT_VECTORS, ForeignReader

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with `reader` once per reader, and with `format` once per format that the reader has."""
    if "reader" not in metafunc.fixturenames or "reader" in vars(metafunc.module):
        return
    old = [(name, 2) for name in WITHOUT_VECTORS]
    if "format" in metafunc.fixturenames:
        pairs = [(name, format) for name in READERS for format in (2, 3)] + old
        metafunc.parametrize(("reader", "format"), pairs, indirect=["reader"])
    else:
        metafunc.parametrize("reader", [*READERS, *WITHOUT_VECTORS], indirect=True)


@pytest.fixture
def reader(request: pytest.FixtureRequest, open_reader: OpenReader) -> ForeignReader:
    return open_reader(request.param)
