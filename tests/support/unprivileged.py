"""A call in a child process without the rights of root, who may read and write everywhere."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def enterable_directory() -> Iterator[Path]:
    """Yield a directory that every user can enter. Those of pytest are private again when another session starts."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def closed(directory: Path) -> Iterator[None]:
    """Take all rights on a directory away, for a while."""
    directory.chmod(0o000)
    try:
        yield
    finally:
        directory.chmod(0o700)


def call_unprivileged(call: Callable[[], object]) -> str:
    """Return the result of the call, or `TYPE: MESSAGE` of its error.

    Modules that the call needs have to be imported before: the child may have no access to them.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            said = str(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, encoding="utf-8") as answer:
        return answer.read()
