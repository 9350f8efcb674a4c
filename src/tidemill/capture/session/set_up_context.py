"""State of one set-up: the parts that all its steps use, what it read from the server, and its result."""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Clock
from tidemill.capture.capture_row import FencedCaptureRow
from tidemill.capture.catalog.columns import TableAttributes
from tidemill.capture.catalog.table_choice import TableChoice
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.changes import Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.timeline import Timeline
from tidemill.capture.setup.publication import PublishedTable
from tidemill.capture.setup.server_checks import ServerFacts, SlotState
from tidemill.capture.tables.copy_progress import SetUpSteps
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.api import Binding, Remap
from tidemill.topics.api import TopicLog


class SetUpContext(msgspec.Struct, frozen=True):
    """Parts of a set-up. `wire` holds the capture's lock. `own` is the capture's row. `line` is the server's timeline.
    A failure of one table affects that table only and is reported through `states`.
    """

    wire: PgConnection
    config: CaptureConfig
    facts: ServerFacts
    line: Timeline
    catalogue: Catalogue
    own: FencedCaptureRow
    remap: Remap
    topics: TopicLog
    states: TableStates
    clock: Clock
    steps: SetUpSteps


class ServerState(msgspec.Struct, frozen=True):
    """State of the server and of what is bound, as of the beginning of the set-up. The slot was read before `latest`,
    so everything that a predecessor confirmed until then is bound.

    `found`: all tables of the database. `choice`: those to capture. `published`: the tables of the publication by oid,
    None if there is no publication. `slot`: None if it does not exist. `latest`: the newest binding.
    """

    found: list[TableInfo]
    choice: TableChoice
    published: dict[int, PublishedTable] | None
    slot: SlotState | None
    latest: Binding | None


class PreparedSession(msgspec.Struct, frozen=True):
    """Result of the set-up.

    `captured`: tables that the stream carries, at least up to the position at which they are paused. `fresh`: those of
    them that are copied before the stream begins. `side_topics`: tables by name whose changes go to a side topic while
    their copy runs. `tables`: the database's description of all chosen tables. `attributes`: the column attributes of
    the known tables, by oid.
    """

    slot: SlotState
    tables: tuple[TableInfo, ...]
    captured: tuple[CapturedTable, ...]
    fresh: tuple[str, ...]
    relations: dict[int, Relation]
    side_topics: dict[str, CapturedTable] = {}
    attributes: dict[int, TableAttributes] = {}
