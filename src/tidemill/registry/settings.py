"""What the registry takes at most. Everything beyond is refused with its number and its limit."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import METASTORE_VALUE_BYTES

SUBJECT_BYTES = 512
"""A subject's name in UTF-8: the metastore's keys hold it, with every zero byte doubled."""

REFERENCES = 64
"""Schemas that one schema refers to, those that they refer to included."""

SCHEMA_BYTES_MOST = METASTORE_VALUE_BYTES - (16 << 10)
"""One row holds a schema with its references."""

WRITE_BUDGET_S = 20.0
"""A write that meets other writers and changes of leadership is tried again for so long."""


class RegistrySettings(msgspec.Struct, frozen=True):
    schema_bytes: int = 192 << 10
    subjects: int = 20_000
    versions_per_subject: int = 1_000
    versions: int = 200_000
    schemas: int = 100_000
    waiting: int = 64
    """Requests that parse or compare schemas, or wait to, in one process."""

    parsed_bytes: int = 4 << 20
    """Text of the schemas whose models are kept; a model is some ten times as large."""
