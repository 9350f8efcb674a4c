"""`./dev bench [NAME [ARGS]]`: run one benchmark, or all of them one after another; `list` names them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = (
    "consensus",
    "objects",
    "metastore",
    "metastore_commits",
    "produce",
    "produce_stages",
    "consume",
    "group_commits",
    "decode",
    "commit_to_client",
    "commit_to_shard",
    "upsert",
    "upsert_keys",
    "upsert_peers",
    "catch_up",
    "catch_up_captured",
    "small_steps",
    "idle",
    "partitions",
    "extents",
    "capture",
    "capture_copy",
    "capture_rows",
    "capture_transactions",
    "shapes",
    "http_servers",
    "positions",
    "lake",
    "lake_hour",
    "lake_parts",
    "lake_reads",
    "scan",
    "scan_python",
    "shard_commits",
    "merge",
    "scaling",
    "derived",
    "tpch",
)
LANES = (
    "chaos",
    "hostile",
    "faults",
    "suites",
    "instances",
    "leaving",
    "fuzz",
    "calendar",
    "steady",
    "unfinished",
    "oracle",
    "versus",
)
"""Long ones that look for faults or for growth, or need an installation: only by name."""

FILES = {"calendar": "month"}
"""Benchmarks whose file cannot have their name: calendar.py would shadow the standard library's module in every
script.
"""


def main() -> int:
    name, *arguments = sys.argv[1:] or ["all"]
    if name == "list":
        print("\n".join((*NAMES, *LANES)))
        return 0
    if name != "all" and name not in (*NAMES, *LANES):
        print(f"bench: no such benchmark: {name}. Choose one of: {', '.join((*NAMES, *LANES))}", file=sys.stderr)
        return 2
    codes = []
    for chosen in NAMES if name == "all" else (name,):
        print(f"--- {chosen}", flush=True)
        codes.append(
            subprocess.run([sys.executable, str(HERE / f"{FILES.get(chosen, chosen)}.py"), *arguments]).returncode
        )
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
