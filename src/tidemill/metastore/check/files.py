"""Check of a domain's objects in the bucket: every manifest and every file that it names.

A file that disappeared together with every manifest that named it was garbage collected during the check and is not a
finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tidemill.base.clock import Rand
from tidemill.base.errors import CorruptError, InvalidError, MissingError
from tidemill.metastore.check.findings import Findings
from tidemill.metastore.domain.settings import prefix_of
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest import FileMeta, Manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.table_cache import BlockCache, TableCache
from tidemill.objects.store import ObjectStore

CACHE_BYTES = 16 << 20
BLOCKS_AT_ONCE = 64
FIX_FILE = "Restore the object from a copy of the bucket, or restore from a manifest that does not name it."
FIX_MANIFEST = "Remove it: older and newer ones are retained."


async def check_domain_files(
    objects: ObjectStore, rand: Rand, uuid: str, findings: Findings, *, deep: bool
) -> Manifest | None:
    """Check one domain's manifests and files; return the newest readable manifest.

    Filters and indexes are read and verified; with `deep` every block as well.
    """
    bucket, files = BucketManifests(objects, prefix_of(uuid), rand), SstFiles(objects, prefix_of(uuid))
    manifests = await _load_manifests(bucket, uuid, findings)
    present = {(name.epoch, name.number, name.nonce): name.size_bytes async for name in files.list()}
    named: dict[FileMeta, str] = {}
    for key, manifest in manifests.items():
        for level in manifest.levels:
            named.update({file: key for file in level})
    tables = TableCache(files, BlockCache(CACHE_BYTES))
    broken: list[tuple[FileMeta, str]] = []
    for number, (file, _) in enumerate(named.items()):
        findings.progress(f"files of domain {uuid[:8]}", number, len(named))
        problem = await _check_file(tables, file, present.get((file.epoch, file.number, file.nonce)), deep)
        if problem:
            broken.append((file, problem))
        findings.walked["files"] += 1
        findings.walked["file bytes"] += file.size_bytes
    still = {name.key async for name in bucket.list()} if broken else set()
    for file, problem in broken:
        by = [key for key, manifest in manifests.items() if key in still and any(file in lv for lv in manifest.levels)]
        if by:
            findings.add(f"manifest {by[-1]}", files.key(file), problem, FIX_FILE)
    wanted = {(file.epoch, file.number, file.nonce) for file in named}
    for identity, size_bytes in present.items():
        if identity not in wanted:
            findings.orphans["files of domains"] += 1
            findings.orphan_bytes += size_bytes
    return max(manifests.values(), key=lambda m: (m.epoch, m.number), default=None)


async def _load_manifests(bucket: BucketManifests, uuid: str, findings: Findings) -> dict[str, Manifest]:
    found: dict[str, Manifest] = {}
    names = [name async for name in bucket.list()]
    for name in names:
        try:
            manifest = await bucket.load(name.key)
        except MissingError:
            continue  # garbage collected since the listing
        except (CorruptError, InvalidError) as error:
            fix = error.fix if name is names[-1] else FIX_MANIFEST
            findings.add(f"domain {uuid}", name.key, error.message.rstrip("."), fix or FIX_FILE)
            continue
        if manifest.domain_uuid != uuid:
            findings.add(f"domain {uuid}", name.key, f"it is of another domain, {manifest.domain_uuid}", FIX_MANIFEST)
            continue
        found[name.key] = manifest
        findings.walked["manifests"] += 1
    return found


async def _check_file(tables: TableCache, file: FileMeta, size_bytes: int | None, deep: bool) -> str:
    """Return the problem of a file, or ""."""
    if size_bytes is None:
        return "the object is missing"
    if size_bytes != file.size_bytes:
        return f"the object has {size_bytes} bytes, the manifest says {file.size_bytes}"
    try:
        meta = await tables.meta(file)
        if deep:
            count = len(meta.last_keys)
            for first in range(0, count, BLOCKS_AT_ONCE):
                blocks = await tables.blocks(file, first, min(BLOCKS_AT_ONCE, count - first), fill_cache=False)
                problem = _key_order_problem(file, [key for block in blocks for key in block.keys])
                if problem:
                    return problem
    except MissingError:
        return "the object is missing"
    except (CorruptError, InvalidError) as error:
        return error.message.rstrip(".")
    finally:
        tables.drop_file(file)
    return ""


def _key_order_problem(file: FileMeta, keys: Sequence[bytes]) -> str:
    if any(a >= b for a, b in pairwise(keys)):
        return "its keys are out of order"
    if keys and not file.smallest <= keys[0] <= keys[-1] <= file.largest:
        return "its keys are outside of the range in the manifest"
    return ""
