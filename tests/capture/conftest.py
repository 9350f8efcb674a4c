"""An error in the columnar encoder fails the test. The product would fall back to encoding row by row, which is exact
but slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.capture.topics import captured_table


@pytest.fixture(autouse=True)
def encoder_faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """Errors of the encoder during this test; a test that plants some clears them."""
    encode, faults = captured_table.encode_block, list[Exception]()

    def watched(*args: Any) -> Any:
        try:
            return encode(*args)
        except Exception as error:
            faults.append(error)
            raise

    monkeypatch.setattr(captured_table, "encode_block", watched)
    yield faults
    assert not faults, f"rows were encoded one by one: {faults[0]!r}"
