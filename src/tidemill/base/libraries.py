"""Libraries of this process: which extra of the package installs an optional one, the error when it is missing, and the
libraries that a process must not import.

The latter are imported by another library only to look for values of their types:

pandas        Arrow imports it at its first array, to check whether values are pandas objects: a second of processor
              time and 40 MiB. Arrow remembers the answer, so pandas stays hidden for the life of the process
hypothesis    kio imports it to register test strategies for its types: half a second, and a directory .hypothesis
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from tidemill.base.errors import InvalidError

EXTRA_OF = {
    "confluent_kafka": "node",
    "cryptography": "node",
    "duckdb": "duckdb",
    "fastavro": "node",
    "fsspec": "duckdb",
    "google": "node",
    "granian": "node",
    "grpc_tools": "node",
    "joserfc": "node",
    "jsonschema": "node",
    "kio": "node",
    "orjson": "node",
    "polars": "polars",
    "postgast": "node",
    "pyspark": "spark",
    "referencing": "node",
    "starlette": "node",
}
"""Extra by module."""


def missing_extra(error: ModuleNotFoundError) -> InvalidError | None:
    """Return the error for a missing optional library; None for any other module."""
    name = (error.name or "").partition(".")[0]
    return _not_installed(name) if name in EXTRA_OF else None


def require(module: str, remark: str = "") -> None:
    """Raise InvalidError unless an optional library is installed. `remark`: what works without it, as a sentence."""
    if not is_installed(module):
        raise _not_installed(module, remark)


def is_installed(module: str) -> bool:
    """Return whether a module of the first level can be imported. It is not imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _not_installed(module: str, remark: str = "") -> InvalidError:
    return InvalidError(
        f"{module} is not installed. {remark}".rstrip(), fix=f"Install it: pip install 'tidemill[{EXTRA_OF[module]}]'"
    )


class HiddenModules:
    """Import hook that hides modules from this process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)


def hide_modules(*names: str) -> None:
    sys.meta_path.insert(0, HiddenModules(names))
