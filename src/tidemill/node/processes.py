"""Which processes a configuration asks for, and how each is started.

The configuration travels to children as one JSON file in the data directory, so that all of them see
what the parent saw, environment variables filled in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tidemill.base.clock import Clock
from tidemill.base.config import Config, ConsensusSection, ObjectsSection
from tidemill.base.errors import Invalid
from tidemill.node.supervise import ChildSpec, Supervisor
from tidemill.spark import CONSENSUS_VARIABLE, OBJECTS_VARIABLE

NODE_MODULE = "tidemill.cli.serve"
"""Started by name: the floor above puts the console into the node's process."""


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
    """Start the node (or several beside each other) and one driver a pipeline, supervised. Call on a running loop."""
    supervisor = supervisor or make_supervisor(config, clock, on_failure, say)
    for number in range(1, nodes + 1):
        numbered = config if number == 1 else beside(config, number)
        path = resolved_path(config).with_name("resolved.json" if number == 1 else f"resolved-{number}.json")
        try:
            write_private(path, numbered.model_dump_json())
        except OSError as error:
            raise Invalid(
                f"cannot write the data directory: node.data={path.parent} error={error.strerror}.",
                fix="Make it writable, or set node.data to another directory.",
            ) from error
        name = "node" if number == 1 else f"node-{number}"
        command = [sys.executable, "-m", NODE_MODULE, str(path)]
        supervisor.add(ChildSpec(name, command, mark=f"node:{numbered.node.name}", vital=True))
    for name in config.pipeline:
        supervisor.add(driver(config, name))
    return supervisor


def make_supervisor(
    config: Config, clock: Clock, on_failure: Callable[[BaseException], None], say: Callable[[str], None]
) -> Supervisor:
    return Supervisor(Path(config.node.data).absolute() / "logs", clock, on_failure, say)


def write_private(path: Path, text: str) -> None:
    """Nobody else may read it at any moment: it holds the URLs and DSNs with their passwords. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


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


def driver(config: Config, name: str) -> ChildSpec:
    """A pipeline's driver. The URLs may hold passwords, so they travel in the environment: a command line is for all
    to see."""
    file = config.pipeline[name].file
    command = [
        sys.executable,
        "-m",
        "tidemill.spark.driver",
        "--domains",
        str(config.metastore.domains),
        "--pipeline",
        file,
        "--name",
        name,
        "--master",
        config.spark.master,
        "--scratch",
        str(Path(config.node.data).absolute() / "scratch" / name),
        "--budget-ms",
        str(int(config.freshness.budget_s * 1000)),
    ]
    environ = {OBJECTS_VARIABLE: config.objects_url, CONSENSUS_VARIABLE: config.consensus_url}
    return ChildSpec(f"pipeline-{name}", command, environ, mark=f"pipeline:{name}", watch=(file,))
