"""handlers: one file per API, named by its key; each says what it leaves out and why.

`APIS` is the whole table; ApiVersions advertises exactly this. Ranges follow Kafka 4.1 as far as served.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka.handlers import (
    k00_produce,
    k01_fetch,
    k02_list_offsets,
    k03_metadata,
    k08_offset_commit,
    k09_offset_fetch,
    k10_find_coordinator,
    k18_api_versions,
    k19_create_topics,
    k20_delete_topics,
    k22_init_producer_id,
    k23_offset_for_leader_epoch,
    k32_describe_configs,
    k60_describe_cluster,
)
from tidemill.kafka.request import Api
from tidemill.kafka.schema.compiled import compile_codecs

APIS: Final[dict[int, Api]] = {
    module.API.key: module.API
    for module in (
        k00_produce,
        k01_fetch,
        k02_list_offsets,
        k03_metadata,
        k08_offset_commit,
        k09_offset_fetch,
        k10_find_coordinator,
        k18_api_versions,
        k19_create_topics,
        k20_delete_topics,
        k22_init_producer_id,
        k23_offset_for_leader_epoch,
        k32_describe_configs,
        k60_describe_cluster,
    )
}
k18_api_versions.advertise(APIS.values())


def compile_all() -> None:
    """The codecs of everything in the table: 0.3 s, for a thread."""
    for api in APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            compile_codecs(api.key, version)
