"""formats: records of topics that are not plain JSON objects → commands, dead letters.

    framing ─► the writer's schema ─► reader of the format ─► conversion by columns ─► delete_when, include ─► commands
               (schema_lookup)        (avro, protobuf, json)

Invariant (one schema per id): a schema never changes, so the same bytes always become the same row. Records of a block
are grouped by schema, and each group is read by columns with one reader.
Invariant (schemas before rows): a block is decoded once every schema that it names is known. A task of Spark has the
schemas of its plan; if it meets another id, the driver looks it up and computes the step.
"""
