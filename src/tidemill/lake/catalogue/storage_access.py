"""Settings with which a client of the catalogue opens the bucket: address, region and, if configured, read-only keys.

Keys are given out only with `lake.credentials = "static-read"`, and only with a table that the principal may read. They
are those of the configuration, never the node's own: its owner decides what they allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec


class StorageAccess(msgspec.Struct, frozen=True):
    """`config`: settings by the names that Iceberg's clients share. `keys`: those of them that are secrets.

    `prefixes`: URIs below which the files of tables are. There are two, since DuckDB applies a single credential only
    to the table's location, and parts are elsewhere.
    """

    prefixes: tuple[str, ...] = ()
    config: dict[str, str] = {}
    keys: dict[str, str] = {}


def storage_access(
    objects_url: str, env: Mapping[str, str], base: str, *, access_key_id: str = "", secret_access_key: str = ""
) -> StorageAccess:
    """Return what clients need to open the store at `objects_url`, whose objects they find below the URI `base`.

    Raises InvalidError for a URL of S3 that the node could not open either. Clients of other clouds use their own
    settings.
    """
    if urlsplit(objects_url).scheme != "s3":
        return StorageAccess()
    from tidemill.objects.buckets.s3 import parse_s3

    _, _, parsed = parse_s3(objects_url, env)
    config = {"s3.region": str(parsed["region"]), "client.region": str(parsed["region"])}
    if endpoint := parsed.get("endpoint"):
        # Iceberg's Java clients and pyiceberg have opposite settings, and opposite defaults.
        hosted = bool(parsed["virtual_hosted_style_request"])
        config["s3.endpoint"] = str(endpoint)
        config["s3.path-style-access"] = "false" if hosted else "true"
        config["s3.force-virtual-addressing"] = "true" if hosted else "false"
    keys = {}
    if access_key_id:
        keys = {"s3.access-key-id": access_key_id, "s3.secret-access-key": secret_access_key}
    return StorageAccess((f"{base}/lake/", f"{base}/shards/"), config, keys)
