"""npm's unmodified @electric-sql/client, following shapes in one process of node."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from oracle_follower import View

CLIENTS = Path(__file__).parents[1] / "clients"
PROGRAM = CLIENTS / "follow_shapes.mjs"


def installed() -> bool:
    return shutil.which("node") is not None and (CLIENTS / "node_modules/@electric-sql/client").is_dir()


class StockClients:
    def __init__(self, url: str, log: Path) -> None:
        self._url = url
        self._log = log.open("ab")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            ["node", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def follow(self, name: str, params: dict[str, str], *, sse: bool) -> StockClient:
        self._send({"follow": name, "url": self._url, "params": params, "sse": sse})
        return StockClient(self, name)

    def tell(self, name: str) -> dict[str, Any]:
        with self._lock:
            self._send({"tell": name})
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        assert line, f"the stock client has ended: {self._log.name}"
        found: dict[str, Any] = json.loads(line)
        return found

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


class StockClient:
    def __init__(self, clients: StockClients, name: str) -> None:
        self.name = f"stock {name}"
        self._clients = clients
        self._key = name

    def view(self) -> View:
        reported = self._clients.tell(self._key)
        assert not reported["failed"], f"{self.name}: {reported['failed']}"
        rows = {str(number): _as_text(row) for number, row in enumerate(reported["rows"])}
        return View(rows, reported["upToDate"], 0, reported["refetches"], reported["refused"])

    def stop(self) -> None:
        """Do nothing: the client ends with its process."""


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    return {name: array_text(value) if isinstance(value, list) else value for name, value in row.items()}


def array_text(items: list[Any]) -> str:
    """Format an array like PostgreSQL, but with every element quoted: see `quoted_array`."""
    shown = (array_text(i) if isinstance(i, list) else "NULL" if i is None else json.dumps(i) for i in items)
    return "{" + ",".join(shown) + "}"


def quoted_array(text: str) -> str:
    """Return the text that `array_text` gives for the one-dimensional list that PostgreSQL prints as `text`."""
    items: list[str | None] = []
    at = 1
    while text[at] != "}":
        if text[at] == ",":
            at += 1
        made = ""
        if text[at] == '"':
            at += 1
            while text[at] != '"':
                at += text[at] == "\\"
                made += text[at]
                at += 1
            at += 1
            items.append(made)
            continue
        while text[at] not in ",}":
            made += text[at]
            at += 1
        items.append(None if made == "NULL" else made)
    return array_text(items)
