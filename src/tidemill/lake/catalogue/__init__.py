"""catalogue: Iceberg's REST catalogue, read-only, under /iceberg of every node.

    request ─► path (messages) ─► routes ─► PublishedTables: names, newest metadata ─► response or Iceberg's error body

Owns paths, bodies and errors of the interface. Does not own who may read (`node/http/auth.py` checks READ of the topic
shard.TABLE) and what is published (`PublishedTables`).
"""

from __future__ import annotations

from tidemill.lake.catalogue.messages import PREFIX, error_body, is_catalogue_path, named_table
from tidemill.lake.catalogue.routes import MAY_READ_SCOPE_KEY, PublishedTable, PublishedTables, catalogue_routes
from tidemill.lake.catalogue.storage_access import StorageAccess, storage_access

__all__ = [
    "MAY_READ_SCOPE_KEY",
    "PREFIX",
    "PublishedTable",
    "PublishedTables",
    "StorageAccess",
    "catalogue_routes",
    "error_body",
    "is_catalogue_path",
    "named_table",
    "storage_access",
]
