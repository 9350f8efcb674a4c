"""Counters as distinct types. Wrap once per batch; inside per-record loops use bare ints in local names.

A Kafka offset and a log position are never the same type; the one place that converts between
them is the partition state of `topics`.
"""

from __future__ import annotations

from typing import NewType

Offset = NewType("Offset", int)
"""Position of a record in a topic partition, as Kafka counts. Half-open ranges: [start, end)."""

LogPosition = NewType("LogPosition", int)
"""Position of a record in a fenced log of `consensus`. Starts at 0."""

Term = NewType("Term", int)
"""Leadership term of a fenced log. A newer term fences every append of an older one. 0 = never led."""

Seq = NewType("Seq", int)
"""Version number of a register. 0 = the key has never been written."""

TimeMs = NewType("TimeMs", int)
"""A tidemill time: milliseconds since the Unix epoch, minted by a remap binding; totally ordered."""

ProducerId = NewType("ProducerId", int)
ProducerEpoch = NewType("ProducerEpoch", int)
TopicId = NewType("TopicId", str)
"""UUID in hex with dashes; a re-created topic has a new one."""
