"""registry: schemas by subject and version: Confluent's REST interface over the metastore, on every node.

    http ─► registry ─► parse_pool ─► avro | jsonschema | protobuf ─► compat_levels
                   └─► writer ─► transitions (pure) ─► store (rows)

Owns what a schema means, when two are compatible, and the HTTP routes. Does not own row layouts (`metastore`), or the
server that carries the routes (`node`).

RG4  Every change is one commit that expects the registry's head as it was read: of racing changes one wins and the
    others look again, so one schema registered by many nodes has one id and one version.
RG5  A change counts once: the head holds the nonces of the newest changes, so whoever was never told an outcome
     finds it there, or knows that it did not land and never will.
"""
