"""merge: the upsert operator as pure functions on Arrow tables, and the local mirror of the output shard that it reads.

No Spark, no clock, no network. `commands` is the input format, `resolve` one step of the operator, and `mirror` the
contents of the output (a small LSM of hash-sorted runs). `operator` is the state machine that a writer drives (ingest,
advance, drain, then committed or feedback). It has the only implementation of the three-way rule.
"""
