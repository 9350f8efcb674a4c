"""Which processes a configuration asks for, and how each is started.

The configuration travels to children as one JSON file in the data directory, so that all of them see
what the parent saw, environment variables filled in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tidemill.base.clock import Clock
from tidemill.base.errors import Invalid
from tidemill.node.config import Config, ConsensusSection, ObjectsSection
from tidemill.node.supervise import ChildSpec, Supervisor

NODE_MODULE = "tidemill.cli.serve"
"""Started by name: the floor above puts the console into the node's process."""


def resolved_path(config: Config) -> Path:
    return Path(config.node.data).absolute() / "resolved.json"


def start_all(
    config: Config, clock: Clock, on_failure: Callable[[BaseException], None], *, nodes: int = 1
) -> Supervisor:
    """Start the node (or several beside each other) and one driver a pipeline, supervised. Call on a running loop."""
    data = Path(config.node.data).absolute()
    supervisor = Supervisor(data / "logs", clock, on_failure)
    for number in range(1, nodes + 1):
        numbered = config if number == 1 else beside(config, number)
        path = resolved_path(config).with_name("resolved.json" if number == 1 else f"resolved-{number}.json")
        try:
            data.mkdir(parents=True, exist_ok=True)
            path.write_text(numbered.model_dump_json())
        except OSError as error:
            raise Invalid(
                f"cannot write the data directory: node.data={data} error={error.strerror}.",
                fix="Make it writable, or set node.data to another directory.",
            ) from error
        name = "node" if number == 1 else f"node-{number}"
        supervisor.add(ChildSpec(name, [sys.executable, "-m", NODE_MODULE, str(path)]))
    for name in config.pipeline:
        supervisor.add(ChildSpec(f"pipeline-{name}", driver_command(config, name)))
    return supervisor


def beside(config: Config, number: int) -> Config:
    """The configuration of node `number` on this machine: its own name, the next ports, the same stores."""
    node = config.node.model_copy(
        update={
            "name": f"{config.node.name}-{number}",
            "http": next_port(config.node.http, number - 1),
            "kafka": next_port(config.node.kafka, number - 1),
        }
    )
    return config.model_copy(
        update={
            "node": node,
            "objects": ObjectsSection(url=config.objects_url),
            "consensus": ConsensusSection(url=config.consensus_url),
        }
    )


def next_port(address: str, by: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by}"


def driver_command(config: Config, name: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tidemill.spark.driver",
        "--objects",
        config.objects_url,
        "--consensus",
        config.consensus_url,
        "--domains",
        str(config.metastore.domains),
        "--pipeline",
        config.pipeline[name].file,
        "--name",
        name,
        "--master",
        config.spark.master,
        "--scratch",
        str(Path(config.node.data).absolute() / "scratch" / name),
    ]
