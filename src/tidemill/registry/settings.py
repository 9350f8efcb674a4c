"""Limits of the registry. A request beyond a limit is refused with the number and the limit."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import METASTORE_VALUE_BYTES

SUBJECT_BYTES = 512
"""Bytes of a subject's name in UTF-8. The metastore's keys contain it, with every zero byte doubled."""

REFERENCES_MAX = 64
"""Number of schemas to which one schema refers, directly or not."""

SCHEMA_BYTES_MAX = METASTORE_VALUE_BYTES - (16 << 10)
"""Bytes of a schema. One row holds it with its references."""

WRITE_BUDGET_S = 20.0
"""Time for which a write is retried when it meets other writers and changes of leadership."""


class RegistrySettings(msgspec.Struct, frozen=True):
    """Configurable limits of the registry."""

    schema_bytes: int = 192 << 10
    subjects: int = 20_000
    versions_per_subject: int = 1_000
    versions: int = 200_000
    schemas: int = 100_000
    waiting: int = 64
    """Requests in one process that parse or compare schemas, or wait to."""

    parsed_bytes: int = 4 << 20
    """Bytes of the texts of schemas whose models are cached; a model is some ten times as large."""
