"""`tidemill verify TABLE`: source at a commit against shard at the matching time."""

from __future__ import annotations


def verify() -> None:
    """placeholder"""
