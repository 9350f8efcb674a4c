"""A broker in a separate process, as tests see it: started, observed from outside, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

from support.waiting import DEADLINE_S

HERE = Path(__file__).parent


class Process:
    """`settings`: KEY=VALUE words for broker_process.py."""

    def __init__(self, directory: Path, *settings: str, port: int = 0) -> None:
        self._directory = directory
        self._settings = settings
        self.port, self.metrics_port = port, 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "broker_process.py"), str(self._directory), str(self.port), *self._settings],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("metrics"):
                self.metrics_port = int(line.split()[1])
            if line.startswith("listening"):
                self.port = int(line.split()[1])
                threading.Thread(target=self._drain, args=(self._process.stdout,), daemon=True).start()
                return
        raise AssertionError("the broker did not start")

    @staticmethod
    def _drain(stdout: Any) -> None:
        for _ in stdout:
            pass

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples, 0.0 without any."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def stall_s(self) -> float:
        """The longest stall of its event loop so far, as far as the loop itself used the processor in it."""
        return self.metric("tidemill_loop_stall_cpu_seconds")

    def memory_mb(self, peak: bool = False) -> float:
        """Resident, now or at most so far."""
        with open(f"/proc/{self._process.pid}/status") as status:
            field = "VmHWM" if peak else "VmRSS"
            return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)
