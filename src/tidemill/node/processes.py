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
from tidemill.node.config import Config
from tidemill.node.supervise import ChildSpec, Supervisor


def resolved_path(config: Config) -> Path:
    return Path(config.node.data).absolute() / "resolved.json"


def start_all(config: Config, clock: Clock, on_failure: Callable[[BaseException], None]) -> Supervisor:
    """Start the node and one driver a pipeline, supervised. Call on a running loop."""
    data = Path(config.node.data).absolute()
    try:
        data.mkdir(parents=True, exist_ok=True)
        resolved_path(config).write_text(config.model_dump_json())
    except OSError as error:
        raise Invalid(
            f"cannot write the data directory: node.data={data} error={error.strerror}.",
            fix="Make it writable, or set node.data to another directory.",
        ) from error
    supervisor = Supervisor(data / "logs", clock, on_failure)
    supervisor.add(ChildSpec("node", [sys.executable, "-m", "tidemill.node.serve", str(resolved_path(config))]))
    for name in config.pipeline:
        supervisor.add(ChildSpec(f"pipeline-{name}", driver_command(config, name)))
    return supervisor


def driver_command(config: Config, name: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tidemill.spark.driver",
        "--objects",
        config.objects_url,
        "--consensus",
        config.consensus_url,
        "--pipeline",
        config.pipeline[name].file,
        "--name",
        name,
        "--master",
        config.spark.master,
        "--scratch",
        str(Path(config.node.data).absolute() / "scratch" / name),
    ]
