"""`./dev bench fuzz [--for S] [--seed N] [TARGET…]`: each target fed with mutated input for S seconds (600).

Targets: http (requests and where clauses), kafka (frames and record batches), pgoutput, json. Each starts the real
thing, mutates good input, and watches the process (alive), its memory and its loop's longest stall, not exceptions
alone. A target fails when the `failures` in its result are not empty.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from harbour import machine

TARGETS = ("http", "kafka", "pgoutput", "json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=[], metavar="TARGET", help="default: all")
    parser.add_argument("--for", dest="seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        print(f"fuzz: no such target: {', '.join(unknown)}", file=sys.stderr)
        return 2
    print(machine())
    failed = []
    for target in options.targets or TARGETS:
        print(f"--- fuzz {target}, {options.seconds:.0f} s, seed {options.seed}", flush=True)
        found: dict[str, Any] = importlib.import_module(f"fuzz_{target}").run(options.seconds, options.seed)
        print(json.dumps(found, indent=1, default=str), flush=True)
        if found.get("failures"):
            failed.append(target)
    print("HOLDS" if not failed else f"DOES NOT HOLD: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
