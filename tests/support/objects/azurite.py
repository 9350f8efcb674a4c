"""Azurite, the Azure Blob Storage emulator of tests/clients, in memory."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

from support.ports import free_port
from support.waiting import eventually

PROGRAM = Path(__file__).parents[2] / "clients" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own well-known account and key, which open nothing else."""


@contextmanager
def azurite(log: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Run the emulator; yields its address and a function that creates a container and returns its name."""
    if not PROGRAM.exists():
        pytest.skip("azurite is not installed (tests/clients/install)")
    port = free_port()
    command = ["node", str(PROGRAM), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=log.parent, stdout=output, stderr=subprocess.STDOUT)
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    numbers = itertools.count()

    def create() -> str:
        name = f"bucket-{next(numbers)}"
        _create_container(endpoint, name)
        return name

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            create()
        except OSError:
            return False
        return True

    try:
        eventually(answers, "azurite answers")
        yield endpoint, create
    finally:
        process.kill()
        process.wait()


def _create_container(endpoint: str, name: str) -> None:
    """Send Create Container with a Shared Key signature."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{headers}{resource}"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    request = urllib.request.Request(
        f"{endpoint}/{name}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Content-Length": "0",
            "Authorization": f"SharedKey {ACCOUNT}:{signature}",
        },
    )
    urllib.request.urlopen(request, timeout=30).close()
