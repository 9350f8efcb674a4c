"""Handlers of all APIs: one file per API, named by its key; those that only reject are in `replica_placement`. Each
documents which parts it omits and why.

`APIS` is the whole table, and ApiVersions advertises exactly this. Version ranges follow Kafka 4.1 as far as supported.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka.api.dispatch import Api
from tidemill.kafka.handlers import (
    k00_produce,
    k01_fetch,
    k02_list_offsets,
    k03_metadata,
    k08_offset_commit,
    k09_offset_fetch,
    k10_find_coordinator,
    k11_join_group,
    k12_heartbeat,
    k13_leave_group,
    k14_sync_group,
    k15_describe_groups,
    k16_list_groups,
    k17_sasl_handshake,
    k18_api_versions,
    k19_create_topics,
    k20_delete_topics,
    k21_delete_records,
    k22_init_producer_id,
    k23_offset_for_leader_epoch,
    k24_add_partitions_to_txn,
    k25_add_offsets_to_txn,
    k26_end_txn,
    k27_write_txn_markers,
    k28_txn_offset_commit,
    k29_describe_acls,
    k30_create_acls,
    k31_delete_acls,
    k32_describe_configs,
    k33_alter_configs,
    k35_describe_log_dirs,
    k36_sasl_authenticate,
    k37_create_partitions,
    k42_delete_groups,
    k44_incremental_alter_configs,
    k47_offset_delete,
    k48_describe_client_quotas,
    k49_alter_client_quotas,
    k50_describe_user_scram_credentials,
    k51_alter_user_scram_credentials,
    k60_describe_cluster,
    k61_describe_producers,
    k65_describe_transactions,
    k66_list_transactions,
    k68_consumer_group_heartbeat,
    k69_consumer_group_describe,
    k74_list_config_resources,
    k75_describe_topic_partitions,
    replica_placement,
)
from tidemill.kafka.schema.codec_compiler import compile_codecs

_MODULES: Final = (
    k00_produce,
    k01_fetch,
    k02_list_offsets,
    k03_metadata,
    k08_offset_commit,
    k09_offset_fetch,
    k10_find_coordinator,
    k11_join_group,
    k12_heartbeat,
    k13_leave_group,
    k14_sync_group,
    k15_describe_groups,
    k16_list_groups,
    k17_sasl_handshake,
    k18_api_versions,
    k19_create_topics,
    k20_delete_topics,
    k21_delete_records,
    k22_init_producer_id,
    k23_offset_for_leader_epoch,
    k24_add_partitions_to_txn,
    k25_add_offsets_to_txn,
    k26_end_txn,
    k27_write_txn_markers,
    k28_txn_offset_commit,
    k29_describe_acls,
    k30_create_acls,
    k31_delete_acls,
    k32_describe_configs,
    k33_alter_configs,
    k35_describe_log_dirs,
    k36_sasl_authenticate,
    k37_create_partitions,
    k42_delete_groups,
    k44_incremental_alter_configs,
    k47_offset_delete,
    k48_describe_client_quotas,
    k49_alter_client_quotas,
    k50_describe_user_scram_credentials,
    k51_alter_user_scram_credentials,
    k60_describe_cluster,
    k61_describe_producers,
    k65_describe_transactions,
    k66_list_transactions,
    k68_consumer_group_heartbeat,
    k69_consumer_group_describe,
    k74_list_config_resources,
    k75_describe_topic_partitions,
)
APIS: Final[dict[int, Api]] = {
    api.key: api
    for api in sorted((*(module.API for module in _MODULES), *replica_placement.APIS), key=lambda api: api.key)
}
k18_api_versions.set_advertised_ranges(APIS.values())


def compile_all() -> None:
    """Compile the codecs of all APIs in the table: 0.3 s, to be run in a thread."""
    for api in APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            compile_codecs(api.key, version)
