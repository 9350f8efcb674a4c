"""upsert: the operator as pure functions on Arrow tables, and the local mirror of the output shard it reads.

No Spark, no clock, no network. `classify` is the three-way rule in its one spelling, `commands` the input
format, `resolve` one step of the operator, `mirror` the output's contents (a small LSM of hash-sorted runs), `operator`
the machine that a writer drives: ingest, advance, drain, then committed or feedback.
"""
