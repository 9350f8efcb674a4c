"""Processes that a configuration requires, and how each is started.

The configuration travels to children as one JSON file in the data directory, so that all of them see what the parent
saw, with environment variables filled in. Settings of pipelines on the command line are applied over those of the file
(`with_overrides`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from tidemill.base.address import Address
from tidemill.base.clock import Clock
from tidemill.base.config.config import Config, pipelines_by_driver
from tidemill.base.config.sections import ConsensusSection, ObjectsSection, PipelineSparkSection
from tidemill.base.errors import InvalidError
from tidemill.base.runtime.private_directories import make_private_directory
from tidemill.base.status.drivers import instance_name, process_name
from tidemill.node.supervise.driver_instances import DRIVER_MODULE
from tidemill.node.supervise.supervisor import ChildSpec, Supervisor
from tidemill.spark.settings import CONF_VARIABLE, CONSENSUS_VARIABLE, OBJECTS_VARIABLE

NODE_MODULE = "tidemill.cli.serve"
"""Node module, started by name: the layer above adds the console to the node's process."""


def with_overrides(
    config: Config,
    names: Iterable[str],
    *,
    instances: int | None = None,
    master: str = "",
    driver_memory: str = "",
    conf: Iterable[str] = (),
) -> Config:
    """Return the configuration with these settings for the pipelines `names`. None and "" leave the file's. Each item
    of `conf` is KEY=VALUE.

    Raises InvalidError with the option that is wrong.
    """
    pairs = [_parse_pair(text) for text in conf]
    given = {"instances": instances, "master": master or None, "driver_memory": driver_memory or None}
    values = {key: value for key, value in given.items() if value is not None}
    pipelines = dict(config.pipeline)
    for name in names:
        section = pipelines[name]
        merged = section.spark.model_dump() | values | {"conf": section.spark.conf | dict(pairs)}
        try:
            spark = PipelineSparkSection.model_validate(merged)
        except ValidationError as error:
            first = error.errors()[0]
            option = "--" + str(first["loc"][0]).replace("_", "-")
            raise InvalidError(f"bad option: {option}: {first['msg']}.", fix=f"Correct {option}.") from error
        pipelines[name] = section.model_copy(update={"spark": spark})
    return config.model_copy(update={"pipeline": pipelines})


def _parse_pair(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise InvalidError(f"invalid Spark setting: --conf {text!r}.", fix="Write --conf KEY=VALUE.")
    return key.strip(), value


def resolved_path(config: Config) -> Path:
    return Path(config.node.data).absolute() / "resolved.json"


def start_all(
    config: Config,
    clock: Clock,
    on_failure: Callable[[BaseException], None],
    *,
    nodes: int = 1,
    say: Callable[[str], None] = lambda _: None,
    supervisor: Supervisor | None = None,
) -> Supervisor:
    """Start the node (or several on one machine) and the drivers of each pipeline, supervised. Call it on a running
    loop."""
    supervisor = supervisor or make_supervisor(config, clock, on_failure, say)
    for number in range(1, nodes + 1):
        numbered = config if number == 1 else numbered_node_config(config, number)
        path = resolved_path(config).with_name("resolved.json" if number == 1 else f"resolved-{number}.json")
        try:
            write_private(path, numbered.model_dump_json())
        except OSError as error:
            raise InvalidError(
                f"cannot write the data directory: node.data={path.parent} error={error.strerror}.",
                fix="Make it writable, or set node.data to another directory.",
            ) from error
        name = "node" if number == 1 else f"node-{number}"
        command = [sys.executable, "-m", NODE_MODULE, str(path)]
        supervisor.add(ChildSpec(name, command, marks=(f"node:{numbered.node.name}",), vital=True))
    for names in group_by_driver(config):
        start_drivers(config, names, supervisor)
    return supervisor


def supervised_pipelines(config: Config) -> list[str]:
    """Return the pipelines whose drivers without a label `up` starts. Drivers of a pipeline with instances = 0 run
    elsewhere."""
    return [name for name, section in config.pipeline.items() if section.spark.instances]


def group_by_driver(config: Config) -> list[list[str]]:
    """Return the pipelines grouped by their driver. A pipeline that names no driver is alone."""
    shared = pipelines_by_driver(config)
    alone = [[name] for name, section in config.pipeline.items() if not section.driver]
    return [*alone, *shared.values()]


def start_drivers(config: Config, names: Sequence[str], supervisor: Supervisor, label: str = "") -> None:
    """Start as many identical drivers of these pipelines as the configuration says. `label` distinguishes the
    drivers of one machine from those of another."""
    for number in range(1, config.pipeline[names[0]].spark.instances + 1):
        supervisor.add(driver_spec(config, names, instance_name(label, number)))


def make_supervisor(
    config: Config, clock: Clock, on_failure: Callable[[BaseException], None], say: Callable[[str], None]
) -> Supervisor:
    return Supervisor(Path(config.node.data).absolute() / "logs", clock, on_failure, say)


def write_private(path: Path, text: str) -> None:
    """Write a file that no other user can read at any moment: it holds the URLs and DSNs with their passwords.
    Raises OSError."""
    make_private_directory(path.parent)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def numbered_node_config(config: Config, number: int) -> Config:
    """Return the configuration of node `number` on this machine: its own name, the next ports, the same stores."""
    node = config.node.model_copy(
        update={
            "name": f"{config.node.name}-{number}",
            "http": offset_port(config.node.http, number - 1),
            "kafka": offset_port(config.node.kafka, number - 1),
        }
    )
    return config.model_copy(
        update={
            "node": node,
            "objects": ObjectsSection(url=config.objects_url),
            "consensus": ConsensusSection(url=config.consensus_url),
        }
    )


def offset_port(address: str, by: int) -> str:
    host, port = Address.parse(address)
    return str(Address(host, port + by))


def driver_spec(config: Config, names: Sequence[str], instance: str = "") -> ChildSpec:
    """Return the spec of a driver of one pipeline, or of several, each with its scratch directory, and one session
    directory. `instance` distinguishes it from identical drivers in its directories, its log and its stages.

    URLs and settings may hold passwords, so they travel in the environment: every user can read a command line.
    """
    data = Path(config.node.data).absolute()
    section = config.pipeline[names[0]]
    options = {
        "domains": str(config.metastore.domains),
        "instance": instance,
        "master": section.spark.master or config.spark.master,
        "driver-memory": section.spark.driver_memory,
        "budget-ms": str(int(config.freshness.budget_s * 1000)),
        "dead-letters-ms": str(int(config.retention.dead_letters_s * 1000)),
    }
    files = tuple(config.pipeline[name].file for name in names)
    flags = list(options.items())
    for name, file in zip(names, files, strict=True):
        flags += [
            ("pipeline", file),
            ("freshness-ms", str(int(config.pipeline[name].freshness_s * 1000))),
            ("name", name),
            ("scratch", str(data / "scratch" / _instance_path(name, instance))),
        ]
    child = f"pipeline-{_instance_path(names[0], instance)}"
    if len(names) > 1:
        flags.append(("session", str(data / "sessions" / _instance_path(section.driver, instance))))
        child = f"driver-{_instance_path(section.driver, instance)}"
    environ = {
        OBJECTS_VARIABLE: config.objects_url,
        CONSENSUS_VARIABLE: config.consensus_url,
        CONF_VARIABLE: json.dumps(section.spark.conf),
    }
    command = [sys.executable, "-m", DRIVER_MODULE, *(part for key, value in flags for part in (f"--{key}", value))]
    return ChildSpec(child, command, environ, marks=tuple(process_name(name, instance) for name in names), watch=files)


def _instance_path(name: str, instance: str) -> str:
    return f"{name}-{instance}" if instance else name
