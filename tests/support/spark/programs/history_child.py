"""A process that maintains the history `h` of the table `orders` until it is killed: OBJECTS CONSENSUS SCRATCH."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.spark.definition import HistoryTable
from tidemill.spark.derived import history
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores

if __name__ == "__main__":
    objects, consensus, scratch = sys.argv[1:]
    history.STEP_RECORDS = 1  # many small appends: many moments to be killed at
    history.SAVE_EVERY = 3
    portal = BlockingPortal("history")
    stores = portal.call(open_stores(StoreUrls(objects, consensus)))
    maintained = history.History(portal, stores, HistoryTable("h", "orders", ("a",)), Path(scratch))
    maintained.run(threading.Event(), lambda: print(maintained.upper, flush=True))
