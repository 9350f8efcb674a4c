"""The six pictures of the documentation, on the grid of `draw.py`: four columns, rows from the top."""

from __future__ import annotations

from draw import Arrow, Box, Picture

OVERVIEW = Picture(
    "overview",
    "PostgreSQL and Kafka clients write, nodes store their changes as records of topics in a bucket, pipelines"
    " maintain tables from them, and clients read the tables or follow them live.",
    (
        Box("postgres", 0, 0, "outside", "PostgreSQL\ncommits"),
        Box("capture", 1, 0, "node", "Capture\nwhole transactions,\nin commit order"),
        Box("shapes", 2, 0, "node", "Live shapes\nElectric's protocol"),
        Box("apps", 3, 0, "outside", "Apps\nbrowsers, servers"),
        Box("kafka", 0, 1, "outside", "Kafka clients\nproduce, consume"),
        Box("topics", 1, 1, "node", "Topics\nKafka's protocol"),
        Box("pipeline", 2, 1, "driver", "Pipeline\nPySpark: keyed upsert,\nderived tables"),
        Box("tables", 3, 1, "stored", "Tables\nexact at every time"),
        Box(
            "durable",
            0,
            2,
            "stored",
            "All durable state\nimmutable objects in one bucket,\nand small values in consensus (SQLite or PostgreSQL)",
            columns=3,
        ),
        Box("readers", 3, 2, "outside", "Readers\nSpark, DuckDB,\nPolars, Arrow"),
    ),
    (
        Arrow("postgres.r", "capture.l"),
        Arrow("capture.r", "shapes.l"),
        Arrow("shapes.r", "apps.l"),
        Arrow("capture.b", "topics.t"),
        Arrow("kafka.r", "topics.l", both=True),
        Arrow("topics.r", "pipeline.l"),
        Arrow("pipeline.r", "tables.l"),
        Arrow("tables.t", "shapes.b"),
        Arrow("tables.b", "readers.t"),
    ),
)

TOPICS = Picture(
    "topics",
    "A batch reserves its place in the order, is uploaded together with others in any order, and is committed to its"
    " partition's log in the order of the reservations. Then the producer gets its acknowledgement.",
    (
        Box("producers", 0, 0, "outside", "Producers\nmany batches in flight"),
        Box("queue", 1, 0, "node", "Order queue\na slot per batch,\nbefore any wait"),
        Box("writer", 2, 0, "node", "L0 writer\nmany partitions\nin one object"),
        Box("l0", 3, 0, "stored", "L0 objects\nuploads end\nin any order"),
        Box("leader", 1, 1, "node", "Partition leader\noffsets, producer\nsequences"),
        Box("log", 2, 1, "stored", "Partition's log\na fenced append is\nthe commit point"),
        Box("append", 3, 1, "node", "Append plan\nuploaded batches,\nin slot order"),
        Box("consumers", 0, 2, "outside", "Consumers\ngroups, pipelines"),
        Box("fetch", 1, 2, "node", "Fetch\nbelow the high\nwatermark"),
        Box("reconciler", 2, 2, "node", "Reconciler\ncopies old batches,\ntrims the log"),
        Box("l1", 3, 2, "stored", "L1 objects\none topic, ordered\nby partition"),
    ),
    (
        Arrow("producers.r", "queue.l"),
        Arrow("queue.r", "writer.l"),
        Arrow("writer.r", "l0.l"),
        Arrow("l0.b", "append.t"),
        Arrow("append.l", "log.r"),
        Arrow("log.l", "leader.r"),
        Arrow("leader.l", "producers.b", "acknowledge"),
        Arrow("leader.b", "fetch.t"),
        Arrow("fetch.l", "consumers.r"),
        Arrow("log.b", "reconciler.t"),
        Arrow("reconciler.r", "l1.l"),
        Arrow("l1.b", "fetch.b", via=319),
    ),
)

METASTORE = Picture(
    "metastore",
    "A commit is one record in the log of its domain. The leader applies it to its memtable, flushes to files in the"
    " bucket, and then replicates the manifest that names them. Followers apply the same log.",
    (
        Box("clients", 0, 0, "node", "Clients\ngroups, schemas,\ncatalogue, extents"),
        Box("leader", 1, 0, "node", "Domain leader\nchecks expected rows,\ngroup commit"),
        Box("log", 2, 0, "stored", "Domain's log\none record: all rows\nor none"),
        Box("followers", 3, 0, "node", "Followers\napply the same log"),
        Box("reads", 0, 1, "node", "Reads\na pinned view,\nnewest layer first"),
        Box("memtable", 1, 1, "node", "Memtable\nrows since the\nlast flush"),
        Box("ssts", 2, 1, "stored", "SSTs, level 0\nsorted files in\nthe bucket"),
        Box("levels", 3, 1, "stored", "SSTs, lower levels\nmerged, sorted\nby key"),
        Box("restore", 0, 2, "outside", "Restore\nneeds the\nbucket alone"),
        Box("bucket_manifest", 1, 2, "stored", "Manifest: bucket\nnames every live file"),
        Box("log_manifest", 2, 2, "stored", "Manifest: log\nleader and followers\nswitch together"),
        Box("trim", 3, 2, "node", "Trim the log\nthe files have\nits rows"),
    ),
    (
        Arrow("clients.r", "leader.l"),
        Arrow("leader.r", "log.l"),
        Arrow("log.r", "followers.l"),
        Arrow("leader.b", "memtable.t"),
        Arrow("memtable.l", "reads.r"),
        Arrow("memtable.r", "ssts.l"),
        Arrow("ssts.r", "levels.l"),
        Arrow("ssts.b", "bucket_manifest.t", "1: files first"),
        Arrow("bucket_manifest.r", "log_manifest.l", "2"),
        Arrow("log_manifest.r", "trim.l", "3"),
        Arrow("bucket_manifest.l", "restore.r"),
    ),
)

TABLES = Picture(
    "tables",
    "A binding gives records a time. The upsert operator turns the records of a step into retractions and insertions,"
    " against a mirror of the table. One compare-and-append makes them visible, and the mirror applies them.",
    (
        Box("records", 0, 0, "stored", "Topic\nrecords at offsets"),
        Box("step", 1, 0, "driver", "Step\nrecords of the next\nbound times"),
        Box("decode", 2, 0, "driver", "Decode\nrows; bad ones are\ndead letters"),
        Box("upsert", 3, 0, "driver", "Upsert operator\n−1 for the old row,\n+1 for the new one"),
        Box("bindings", 0, 1, "stored", "Bindings\na time, and the\noffsets it covers"),
        Box("mirror", 2, 1, "driver", "Mirror\nthe table's rows,\nby key"),
        Box("readers", 0, 2, "outside", "Readers\nat since ≤ t < upper"),
        Box("table", 1, 2, "stored", "Table's log\nsince, upper, parts"),
        Box("cas", 2, 2, "driver", "Compare-and-append\nonly if upper\nis as expected"),
        Box("part", 3, 2, "stored", "Part\na Parquet object"),
    ),
    (
        Arrow("records.r", "step.l"),
        Arrow("step.r", "decode.l"),
        Arrow("decode.r", "upsert.l"),
        Arrow("bindings.r", "step.b:0.3"),
        Arrow("mirror.r", "upsert.b:0.3"),
        Arrow("upsert.b:0.7", "part.t:0.7"),
        Arrow("part.l", "cas.r"),
        Arrow("cas.l", "table.r"),
        Arrow("table.l", "readers.r"),
        Arrow("table.t:0.7", "mirror.l", "feedback"),
    ),
)

CAPTURE = Picture(
    "capture",
    "The slot delivers transactions in commit order to the topic writer and to shapes. Each reports what it has made"
    " durable; the flush tracker confirms to PostgreSQL the position below which all of them have.",
    (
        Box("postgres", 0, 0, "outside", "PostgreSQL\nslot: retains WAL\nnot yet confirmed"),
        Box("stream", 1, 0, "node", "Stream\npgoutput messages"),
        Box("decode", 2, 0, "node", "Decode\nfragments of one\ntransaction"),
        Box("collector", 3, 0, "node", "Collector\nin commit order,\nto every consumer"),
        Box("status", 0, 1, "node", "Standby status\nconfirmed LSN"),
        Box("tracker", 1, 1, "node", "Flush tracker\nleast position that\nall have flushed"),
        Box("shapes", 2, 1, "node", "Shapes\na log on disk for\neach live shape"),
        Box("writer", 3, 1, "node", "Topic writer\none topic per table"),
        Box("pipelines", 2, 2, "driver", "Pipelines\nread up to the\nnewest binding"),
        Box("binding", 3, 2, "stored", "Binding\na time at the commit,\nfor pipelines"),
    ),
    (
        Arrow("postgres.r", "stream.l"),
        Arrow("stream.r", "decode.l"),
        Arrow("decode.r", "collector.l"),
        Arrow("collector.b:0.3", "shapes.t"),
        Arrow("collector.b:0.7", "writer.t:0.7"),
        Arrow("shapes.l", "tracker.r"),
        Arrow("writer.b:0.3", "tracker.b", "flush notices", via=219),
        Arrow("tracker.l", "status.r"),
        Arrow("status.t", "postgres.b", "confirm"),
        Arrow("writer.b:0.7", "binding.t:0.7"),
        Arrow("binding.l", "pipelines.r"),
    ),
)

SHAPES = Picture(
    "shapes",
    "A change of a captured table is matched with the shapes that it may concern; a table of a pipeline is followed by"
    " its appends. Both end in the log of a shape, which clients read from their offset on.",
    (
        Box("tap", 0, 0, "node", "Capture's tap\nchanges, in\ncommit order"),
        Box("index", 1, 0, "node", "Filter index\nshapes that a change\nmay concern"),
        Box("consumer", 2, 0, "node", "Where clause\nrow enters, stays,\nleaves"),
        Box("log", 3, 0, "stored", "Shape log\noperations at log\noffsets, on disk"),
        Box("table", 0, 1, "stored", "Table\nof a pipeline"),
        Box("feed", 1, 1, "node", "Feed\nupdates above the\nlast time"),
        Box("clients", 0, 2, "outside", "Clients\nresume at handle\nand offset"),
        Box("proxy", 1, 2, "outside", "CDN or proxy\n(optional) shares\nequal responses"),
        Box("responses", 2, 2, "node", "Responses\nlong poll or\nevent stream"),
        Box("initial", 3, 2, "node", "First request\nrights, plan, rows of\none snapshot"),
    ),
    (
        Arrow("tap.r", "index.l"),
        Arrow("index.r", "consumer.l"),
        Arrow("consumer.r", "log.l"),
        Arrow("table.r", "feed.l"),
        Arrow("feed.r", "log.b:0.2"),
        Arrow("log.b:0.5", "responses.t", via=219),
        Arrow("initial.t:0.8", "log.b:0.8"),
        Arrow("responses.l", "proxy.r"),
        Arrow("proxy.l", "clients.r"),
    ),
)

PICTURES = (OVERVIEW, TOPICS, METASTORE, TABLES, CAPTURE, SHAPES)
