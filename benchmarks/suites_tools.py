"""Stand-ins for `kafka-topics.sh` and `kafka-acls.sh`, with the options that librdkafka's tests use."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

WITHIN_S = 30


def topics(admin: AdminClient, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="kafka-topics.sh", allow_abbrev=False)
    parser.add_argument("--create", action="store_true", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, default=-1)
    parser.add_argument("--replication-factor", type=int, default=-1)
    parser.add_argument("--config", action="append", default=[])
    given = parser.parse_args(arguments)
    config = dict(pair.split("=", 1) for pair in given.config)
    topic = NewTopic(given.topic, given.partitions, given.replication_factor, config=config)
    admin.create_topics([topic])[given.topic].result(WITHIN_S)


def acls(admin: AdminClient, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="kafka-acls.sh", allow_abbrev=False)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--remove", action="store_true")
    parser.add_argument("--force", action="store_true")
    for permission in ("allow", "deny"):
        parser.add_argument(f"--{permission}-principal")
        parser.add_argument(f"--{permission}-host")
    parser.add_argument("--operation", required=True)
    parser.add_argument("--topic", required=True)
    given = parser.parse_args(arguments)
    denies = given.deny_principal is not None
    rule = (
        ResourceType.TOPIC,
        given.topic,
        ResourcePatternType.LITERAL,
        given.deny_principal if denies else given.allow_principal,
        given.deny_host if denies else given.allow_host,
        AclOperation[given.operation.upper()],
        AclPermissionType.DENY if denies else AclPermissionType.ALLOW,
    )
    changes = admin.delete_acls([AclBindingFilter(*rule)]) if given.remove else admin.create_acls([AclBinding(*rule)])
    for change in changes.values():
        change.result(WITHIN_S)


def install(directory: Path) -> None:
    """The two scripts, in `directory`/bin."""
    (directory / "bin").mkdir(parents=True)
    for name in ("topics", "acls"):
        script = directory / "bin" / f"kafka-{name}.sh"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        script.chmod(0o755)


if __name__ == "__main__":
    what, _, address, *rest = sys.argv[1:]
    client = AdminClient({"bootstrap.servers": address})
    (topics if what == "topics" else acls)(client, rest)
