"""The modules that the node's process loads, and those that it must not load while it serves."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support.ports import free_port
from support.waiting import DEADLINE_S, eventually
from tidemill.base.config.config import parse

ARROW = """
import sys
from tidemill.base.libraries import hide_modules
hide_modules("pandas", "hypothesis")
import tidemill.node.node
import numpy as np, pyarrow as pa, pyarrow.json, pyarrow.parquet
pa.array(np.arange(3)); pa.array(["a"]); pa.table({"a": [1, 2]}).filter(pa.array([True, False])).to_pylist()
loaded = {name.partition(".")[0] for name in sys.modules}
sys.exit(("pandas" in loaded) + 2 * ("hypothesis" in loaded))
"""


def test_neither_pandas_nor_hypothesis_is_loaded_into_a_node() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARROW], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    without = ARROW.replace('hide_modules("pandas", "hypothesis")\n', "")
    assert (
        subprocess.run([sys.executable, "-c", without], capture_output=True, timeout=DEADLINE_S, check=False).returncode
        == 3
    )


WITHOUT_DNS = """
import runpy, socket, sys, threading
resolve = socket.getaddrinfo

def unanswered(host, *rest, **named):
    return threading.Event().wait() if host == "nowhere.invalid" else resolve(host, *rest, **named)

socket.getaddrinfo = unanswered
config = sys.argv[2]
if sys.argv[1] == "up":
    from tidemill.cli.main import run
    sys.argv = ["tidemill", "up", "--instances", "0", "-c", config]
    run()
else:
    sys.argv = ["serve", config]
    runpy.run_module("tidemill.cli.serve", run_name="__main__")
"""


@pytest.mark.processes
@pytest.mark.parametrize("program", ["serve", "up"])
def test_a_process_that_resolves_a_name_ends_when_it_is_asked_to(tmp_path: Path, program: str) -> None:
    """A name that no DNS server resolves occupies a thread for at least 10 s. In this test it never ends."""
    url = "postgresql://tidemill@nowhere.invalid/tidemill"
    http, kafka = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    node = {"data": str(tmp_path / "data"), "http": http, "kafka": kafka}
    settings = {"node": node, "consensus": {"url": url}, "objects": {"url": f"file://{tmp_path}/objects"}}
    if program == "serve":
        config = tmp_path / "resolved.json"
        config.write_text(parse(settings, origin="").model_dump_json())
    else:
        config = tmp_path / "tidemill.toml"
        tables = (
            (name, "\n".join(f'{key} = "{value}"' for key, value in table.items())) for name, table in settings.items()
        )
        config.write_text("\n".join(f"[{name}]\n{lines}" for name, lines in tables))
    process = subprocess.Popen([sys.executable, "-c", WITHOUT_DNS, program, str(config)])
    try:
        eventually(lambda: answers(http))
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def answers(http: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{http}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
