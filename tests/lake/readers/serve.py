"""Loop of a reader: a request as a line of JSON on standard input, a response as a line of JSON on standard output.

Request: {"metadata": URL} or {"catalogue": URL, "table": name, "token"?}, with {"snapshot"?: id, "tag"?: name,
"between"?: [column, first, end], "out": file}. DuckDB and Spark also take {"select"?: expressions}, and {"parquet":
directory} as a source. The rows are written to `out` in Arrow's IPC format. Response:
{"rows": n} or {"error": text}. The process stays, so that a reader's start is paid once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa

Read = Callable[[dict[str, Any]], pa.Table]


def serve(read: Read) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print
    for line in sys.stdin:
        request = json.loads(line)
        try:
            table = read(request)
            with pa.OSFile(request["out"], "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            answer = {"rows": table.num_rows}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
