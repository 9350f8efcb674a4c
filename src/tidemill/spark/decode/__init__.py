"""decode: Kafka record batches → upsert commands and dead letters, as Arrow tables.

A pure function of (records, bindings, schema): every writer decodes alike. `records` maps offsets to times and cuts
batches to slices, `captured` reads topics written by capture, `stream` reads JSON by a declared schema and reports what
it cannot read.
"""
