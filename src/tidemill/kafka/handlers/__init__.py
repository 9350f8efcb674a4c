"""Handlers of all APIs: one file per API, named by its key, or by all keys if several requests are
one procedure. `replica_placement` has the APIs that move replicas or leaders. Each documents which parts it omits and
why.

`APIS` is the whole table, and ApiVersions advertises exactly this. Version ranges follow Kafka 4.1 as far as supported.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Final

from tidemill.kafka.api.dispatch import Api
from tidemill.kafka.handlers import k18_api_versions
from tidemill.kafka.schema.codec_compiler import compile_codecs


def _apis() -> Iterator[Api]:
    """Yield the API of each module `kNN_NAME`, and the APIs of the modules that have several."""
    for found in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        yield from module.APIS if hasattr(module, "APIS") else (module.API,)


APIS: Final[dict[int, Api]] = {api.key: api for api in sorted(_apis(), key=lambda api: api.key)}
k18_api_versions.set_advertised_ranges(APIS.values())


def compile_all() -> None:
    """Compile the codecs of all APIs in the table: 0.3 s, to be run in a thread."""
    for api in APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            compile_codecs(api.key, version)
