"""A complete node whose maintenance and retention run continuously, so that work of minutes takes seconds.

usage: quick_node.py CONFIG.json
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from tidemill.base.config.sections import StorageSection
from tidemill.cli import serve
from tidemill.maintenance import job_list
from tidemill.maintenance.topics.l0_garbage import L0GarbageCollector
from tidemill.node import assembly
from tidemill.topics.config.settings import TopicSettings

EVERY_S = 0.3


def quick(section: StorageSection) -> TopicSettings:
    return replace(
        SERVED(section), settle_after_s=0.5, retention_check_s=EVERY_S, catalogue_poll_s=EVERY_S, cache_bytes=0
    )


SERVED = assembly.topic_settings
JOBS = ("TOPIC_OBJECTS", "TOPIC_L1", "TOPIC_L1_LEVELS", "TOPIC_COMPACTION")


def main() -> int:
    assembly.topic_settings = quick
    for job in JOBS:
        setattr(job_list, f"{job}_EVERY_S", EVERY_S)
    kept = L0GarbageCollector.__init__.__kwdefaults__
    assert kept is not None
    kept["quiet_s"] = 1.0
    return serve.main()


if __name__ == "__main__":
    sys.exit(main())
