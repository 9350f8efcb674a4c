"""Settings of published tables, and the places of their objects.

    lake/<id of the table>/metadata/<version>-l@<time written>-<nonce>.metadata.json
    lake/<id of the table>/metadata/l@<time written>-<nonce>.…   manifest lists, manifests
    lake/<id of the table>/data/l@<time written>-<nonce>.…       vectors, position deletes, rows of no part

Readers open objects by URI: the base of the bucket, then the key. ClickHouse takes the version of the metadata from the
name of its file, as Iceberg's own catalogues write it, and refuses other names.
"""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.config.sections import LakeSection
from tidemill.base.errors import InvalidError
from tidemill.objects.factory import local_directory

PREFIX = "lake/"


class LakeSettings(msgspec.Struct, frozen=True):
    """`base` is the URI of the bucket without a trailing slash.

    format      of Iceberg's tables: 2 or 3
    interval_s  least time between two publications of a table
    keep_s      time for which a snapshot is listed after another replaced it
    """

    base: str
    format: int = 3
    interval_s: float = 30.0
    keep_s: float = 3600.0

    @property
    def keep_ms(self) -> int:
        return int(self.keep_s * 1000)

    def uri(self, key: str) -> str:
        return f"{self.base}/{key}"

    def location(self, shard_id: str) -> str:
        return self.uri(f"{PREFIX}{shard_id}")


def lake_settings(section: LakeSection, objects_url: str) -> LakeSettings:
    """Return the settings of a configuration. Raises InvalidError if other programs cannot open the bucket."""
    base = section.location.rstrip("/") or base_uri(objects_url, local_directory(objects_url))
    return LakeSettings(base, section.format, section.interval_s, section.keep_s)


def base_uri(objects_url: str, directory: str | None) -> str:
    """Return the URI by which other programs open the bucket; `directory` is that of a local store, else None.

    Raises InvalidError for a store that only this process can read.
    """
    if directory is not None:
        return f"file://{directory}".rstrip("/")
    parts = urlsplit(objects_url)
    path = parts.path.rstrip("/")
    if parts.scheme in ("s3", "gs"):
        return f"{parts.scheme}://{parts.netloc}{path}"
    account = parse_qs(parts.query).get("account", [""])[0]
    if parts.scheme == "az" and account:
        return f"abfss://{parts.netloc}@{account}.dfs.core.windows.net{path}"
    raise InvalidError(
        f"other programs cannot open this store: scheme={parts.scheme or objects_url!r}.",
        fix="Set lake.location to the bucket's URI, or use a directory or a bucket.",
    )


def object_key(shard_id: str, folder: str, now_ms: int, rand: Rand, suffix: str) -> str:
    """Return a key that is never reused. `written_ms` of `shards.api` reads its time."""
    return f"{PREFIX}{shard_id}/{folder}/l@{now_ms}-{rand.nonce()[:16]}{suffix}"


def metadata_key(shard_id: str, version: int, now_ms: int, rand: Rand) -> str:
    """Return a key of table metadata, which is never reused. The version grows with each publication."""
    return f"{PREFIX}{shard_id}/metadata/{version:05d}-l@{now_ms}-{rand.nonce()[:16]}.metadata.json"
