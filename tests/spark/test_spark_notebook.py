"""The notebook of the documentation: its ten cells, executed in order in one process, against a running node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.faults.cluster import Cluster
from tidemill.spark.session.java import ensure_spark_home, find_java

pytestmark = [pytest.mark.spark, pytest.mark.processes]

NOTEBOOK = Path(__file__).parents[2] / "docs" / "guides" / "notebook.ipynb"
EPILOGUE = """
assert result == [{"product_id": 0, "name": "ale"}, {"product_id": 1, "name": "bun"}, {"product_id": 3, "name": "dice"}]
assert (running.is_running, running.status().state, running.wait(0)) == (False, "stopped", True)
"""


def test_the_notebook_of_the_documentation_runs(tmp_path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    assert len(cells) == 10
    cluster = Cluster(tmp_path)
    cluster.up()
    try:
        cluster.ready()
        program = tmp_path / "notebook.py"
        program.write_text("\n\n".join([*cells, EPILOGUE]))
        environ = {
            **cluster.environ,
            "JAVA_HOME": str(find_java().home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TIDEMILL_KAFKA": cluster.kafka,
        }
        if home := ensure_spark_home():
            environ["SPARK_HOME"] = home
        done = subprocess.run(
            [sys.executable, str(program)], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
    finally:
        cluster.close()
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout.replace(" ", "").splitlines()
    expected = {"|home|50|", "|search|50|", "|c0|3|checkout|", "|3|26|dice|", "|0|24|ale|"}
    assert expected <= set(shown), done.stdout
