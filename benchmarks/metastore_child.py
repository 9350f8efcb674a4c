"""The processes of the metastore benchmark: one engine each, asked by lines of JSON, watched from outside."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil


class Child:
    """One engine's process; `call` is one step. With `watch` its resident memory is sampled all the time."""

    def __init__(self, engine: str, count: int, folder: Path, *, watch: bool = False) -> None:
        self.engine = engine
        script = Path(__file__).with_name("metastore_turn.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), engine, str(count), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._receive()
        self._observed = psutil.Process(self._process.pid)
        self.base_bytes = self._observed.memory_info().rss
        self.samples: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        if watch:
            threading.Thread(target=self._sample, daemon=True).start()

    def call(self, step: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([step, arguments]) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        self._ended.set()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine}: its process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _sample(self) -> None:
        workers: list[psutil.Process] = []
        for turn in itertools.count():
            if self._ended.wait(0.01):
                return
            try:
                if turn % 20 == 0:  # looks at every process of the machine
                    workers = self._observed.children(recursive=True)
                own = self._observed.memory_info().rss
                helping = sum(worker.memory_info().rss for worker in workers if worker.is_running())
            except psutil.Error:
                continue
            self.samples.append((time.perf_counter(), own, helping))


def table(lines: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=False)))
