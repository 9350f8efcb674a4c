"""`./dev bench oracle --for S [--seed N] [--postgres 15]`: worlds of tests/oracle, each with its seed.

A world's seed selects its features, and its line prints them: `publications` of other users on the same tables,
`deferrable` keys, a `failover` to a lagging standby, `large` transactions (200,000 rows). `--with` names others.

A world that fails is reported with its seed, its tables and clauses and the rows that differ, and the next one begins;
`--seed N --worlds 1` repeats it, as far as the machine's timing allows. Exit code 1 when any failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "oracle"), str(TESTS)]

from oracle_world import Plan, world  # noqa: E402

from support.postgres import EmbeddedPostgres  # noqa: E402

BINARIES = TESTS / "clients" / "node_modules"
SETTINGS = {"fsync": "off", "shared_buffers": "32MB"}
ODDS = {"publications": 0.5, "deferrable": 0.5, "failover": 0.4, "large": 0.4}


def features_of(seed: int, chosen: str | None) -> dict[str, bool]:
    rand = random.Random(f"{seed} features")
    drawn = {name: rand.random() < odds for name, odds in ODDS.items()}
    return drawn if chosen is None else {name: name in chosen.split(",") for name in ODDS}


def run(plan: Plan, version: str, keep: Path | None) -> str:
    """One world; what failed, "" = nothing."""
    seed = plan.seed
    binaries = None if version == "18" else BINARIES / f"postgres-{version}" / "native" / "bin"
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        directory = keep / f"seed{seed}" if keep is not None else Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        with EmbeddedPostgres(directory / "postgres", settings=SETTINGS, binaries=binaries) as server:
            try:
                with world(plan, server.dsn, directory, server) as made:
                    made.run()
                    counts = {**made.counts, **made.judge.counts}
                    settled = f"settled_s={made.judge.settled_s} safe_s={made.others.safe_s}"
                    shown = f"with {','.join(plan.features) or 'nothing else'}: {made.faults} {settled} {counts}"
                    print(f"seed {seed} postgres {version} {shown}", flush=True)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                return "".join(traceback.format_exception(error, limit=-8))
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="seconds", type=float, default=600.0, help="begin no world after so many seconds")
    parser.add_argument("--seed", type=int, default=1, help="of the first world; the next has the next")
    parser.add_argument("--worlds", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--postgres", default="", choices=["", "14", "15", "16", "17", "18"], help="15 and 18 in turn")
    parser.add_argument("--without-changes", action="store_true", help="no DDL while it runs")
    parser.add_argument("--without-shards", action="store_true", help="no pipeline")
    parser.add_argument("--with", dest="chosen", metavar="FEATURE,…", help=f"of {', '.join(ODDS)}; '' = none of them")
    parser.add_argument("--keep", type=Path, help="leave the data and logs of each world there")
    given = parser.parse_args()
    began_s, failed, ran = time.monotonic(), [], 0
    while ran < given.worlds and time.monotonic() - began_s < given.seconds:
        seed = given.seed + ran
        version = given.postgres or ("18" if seed % 2 else "15")
        plan = Plan(
            seed=seed,
            rounds=given.rounds,
            changes=not given.without_changes,
            shards=not given.without_shards,
            **features_of(seed, given.chosen),
        )
        found = run(plan, version, given.keep)
        ran += 1
        if found:
            failed.append(seed)
            print(f"seed {seed} postgres {version} FAILED\n{found}", flush=True)
    print(f"{ran} worlds in {time.monotonic() - began_s:.0f} s, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
