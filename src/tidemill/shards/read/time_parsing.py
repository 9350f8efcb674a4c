"""Parse times as people write them."""

from __future__ import annotations

from datetime import UTC, datetime
from numbers import Integral

from tidemill.base.errors import InvalidError

LATEST = "latest"


def as_of_ms(value: str | int | datetime | None) -> int | None:
    """Parse a time into ms: an integer (also numpy's), ISO 8601 text or a datetime (UTC without a zone).

    Returns None, which means the newest, for `latest` and None. Fractions of a ms are truncated. Raises InvalidError.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == LATEST):
        return None
    if isinstance(value, bool) or not isinstance(value, Integral | str | datetime):
        raise InvalidError(
            f"as_of is not a time: as_of={value!r}.",
            fix="Use ms since 1970 as an integer, ISO 8601 text or a datetime.",
        )
    if not isinstance(value, str | datetime):
        return int(value)
    if isinstance(value, str):
        text = value.strip()
        try:
            if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
                return int(text)
            value = datetime.fromisoformat(text)
        except ValueError as error:
            raise InvalidError(
                f"as_of is not a time: as_of={text[:100]!r}.",
                fix="Write ms since 1970, 2026-11-22T12:00:00Z, or latest.",
            ) from error
    moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 1000 + since_epoch.microseconds // 1000
