"""Checks that run on an executor before it gets work. These functions are pickled by value, because an executor may not
have our code yet: the top of this file imports only the standard library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
import zlib
from pathlib import Path

OWN_CODE = "tidemill's own code"


def code_checksum(package: Path) -> str:
    """Return a name of the code in a package's directory: equal directories have equal names."""
    found = 0
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found = zlib.crc32(path.relative_to(package).as_posix().encode(), found)
            found = zlib.crc32(path.read_bytes(), found)
    return f"{found:08x}"


def missing_packages(wanted: dict[str, str], code: str) -> list[str]:
    """Return the parts of `wanted` (distribution → version) and of our code (`code_checksum`) that this interpreter
    lacks in exactly that version."""
    out = []
    for name, version in wanted.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = ""
        if found != version:
            out.append(f"{name} {version}" + (f" (has {found})" if found else ""))
    spec = importlib.util.find_spec("tidemill")
    if spec is None or spec.origin is None or code_checksum(Path(spec.origin).parent) != code:
        out.append(OWN_CODE)
    return out


def check_stores() -> str:
    """Do what a task does first: import our code, open the bucket and consensus. Return "", or where and why it
    failed."""
    try:
        from tidemill.spark.settings import IN_ENVIRONMENT
        from tidemill.spark.stores import shared_stores

        portal, stores = shared_stores(IN_ENVIRONMENT)
        portal.call(stores.consensus.head("metastore/cluster"))
    except Exception as error:
        return f"host={socket.gethostname()} error={type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""
