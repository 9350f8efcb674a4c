"""Modules that a process must not import, because a library would import them only to look for values of their types.

pandas        Arrow imports it at its first array, to check whether values are pandas objects: a second of processor
              time and 40 MiB. Arrow remembers the answer, so pandas stays hidden for the life of the process
hypothesis    kio imports it to register test strategies for its types: half a second, and a directory .hypothesis
"""

from __future__ import annotations

import sys


class HiddenModules:
    """Import hook that hides modules from this process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)


def hide_modules(*names: str) -> None:
    sys.meta_path.insert(0, HiddenModules(names))
