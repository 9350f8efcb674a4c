"""Limit each property test to `MOST` generated examples in the inner loop, even if it asks for more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

MOST = 10


def few_examples(items: Iterable[pytest.Item]) -> None:
    for item in items:
        owner: Any = getattr(item, "cls", None)
        function: Any = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
        if isinstance(getattr(owner, "settings", None), settings):  # of a state machine
            owner.settings = _few(owner.settings)
        elif hasattr(function, "_hypothesis_internal_use_settings"):
            function._hypothesis_internal_use_settings = _few(function._hypothesis_internal_use_settings)


def _few(found: settings) -> settings:
    return settings(found, max_examples=min(found.max_examples, MOST))
