"""Sentences about stages and blockers, for people: names of statuses become words, and states become verbs."""

from __future__ import annotations

from tidemill.base.status.status import FOUNDATIONS, NODE, PROCESS, DerivedStatus, StageState

_FOUNDATION_WORDS = {
    "objects": "the bucket",
    "consensus": "consensus",
    "metastore": "the metastore",
    "descriptors": "the supply of file descriptors",
}
_KINDS = {
    "shard": "table {}",
    "topic": "topic {}",
    "node": "node {}",
    "metastore": "metastore domain {}",
    "keeper": "maintenance job {}",
    "lake": "the Iceberg table of {}",
    "shapes": "the shape feed of {}",
    "shape": "shape {}",
    "postgres": "the PostgreSQL server {}",
    "postgres-pid": "PostgreSQL session {}",
}
_WORDS = {
    "topics": "the group of topics without work",
    "shapes": "the shape service",
    "keeper": "maintenance",
    "lake": "the publisher of Iceberg tables",
    "operator": "an operator",
    "kafka:accept": "the Kafka listener",
    "http:certificates": "the HTTP certificate",
    "http:rules": "the copy of the access rules for HTTP",
}
_STATES = {
    StageState.MOVING: "advances",
    StageState.IDLE: "has reached its target",
    StageState.WAITING: "waits",
    StageState.STUCK: "does not advance",
    StageState.BLIND: "is not reported",
}


def describe_name(name: str) -> str:
    """Return the words for a status or an outside blocker; an unknown name is returned unchanged."""
    if name in _WORDS:
        return _WORDS[name]
    kind, _, rest = name.partition(":")
    if name.startswith(PROCESS):
        return _describe_process(rest)
    foundation, at, process = name.partition("@")
    if at:
        if foundation in FOUNDATIONS:
            return f"{_FOUNDATION_WORDS[foundation]} as seen by {_describe_process(process)}"
        return f"{describe_name(foundation)} in {_describe_process(process)}"
    if kind in _KINDS and rest:
        return _KINDS[kind].format(rest)
    if kind == "capture":
        capture, slash, _ = rest.partition("/")
        return f"the topic writer of capture {capture}" if slash else f"capture {capture}"
    if kind == "table":
        capture, _, table = rest.partition("/")
        return f"captured table {table} of {capture}"
    if kind == "binding":
        return f"the time binding of {rest.replace('/', ' ', 1)}"
    if kind == "pipeline":
        return _describe_pipeline(rest)
    return name


def _describe_process(process: str) -> str:
    kind, _, rest = process.partition(":")
    if process.startswith(NODE):
        return f"node {rest}"
    if kind != "pipeline":
        return f"process {process}"
    pipeline, _, instance = rest.partition(":")
    return f"driver {instance} of pipeline {pipeline}" if instance else f"the driver of pipeline {pipeline}"


def _describe_pipeline(rest: str) -> str:
    pipeline, _, part = rest.partition(":")
    if part.startswith("table/"):
        return f"table {part.removeprefix('table/')} of pipeline {pipeline}"
    if part == "spark":
        return f"the Spark session of pipeline {pipeline}"
    return f"{part} of pipeline {pipeline}" if part else f"pipeline {pipeline}"


def describe_state(derived: DerivedStatus) -> str:
    """Return one sentence about a stage: what it is, what it does, and why."""
    mark = derived.mark
    name = describe_name(mark.name)
    subject = name[:1].upper() + name[1:]
    if mark.name.startswith(PROCESS) and mark.reason:
        return _end(f"{subject} {mark.reason}")
    verb = "is paused" if mark.parked else "fails" if mark.error else _STATES[derived.state]
    return _end(f"{subject} {verb}{f': {mark.reason}' if mark.reason else ''}")


def _end(text: str) -> str:
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
