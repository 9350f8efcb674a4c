"""Groups of batches that a captured table's decoder was asked to read from columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tidemill.spark.decode.captured import CapturedDecoder


class ColumnGroups:
    """Record for each group whether it was decoded from columns, and count the rows of those that were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.decoded: list[bool] = []
        self.rows = 0
        decode_columns = CapturedDecoder.decode_columns

        def counted(decoder: CapturedDecoder, group: Sequence[Any]) -> Any:
            found = decode_columns(decoder, group)
            self.decoded.append(found is not None)
            self.rows += len(found) if found is not None else 0
            return found

        patch.setattr(CapturedDecoder, "decode_columns", counted)
