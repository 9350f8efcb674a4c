"""registry: schemas by subject and version: Confluent's REST interface over the metastore, on every node.

    http ─► registry ─► parse_pool ─► schema_types ─► avro | jsonschema | protobuf
              └─► writer ─► transitions (pure) ─► store (rows)

The room owns the meaning of schemas, the rules by which two are compatible, and the HTTP routes. It does not own row
layouts (`metastore`) or the server that serves the routes (`node`).

Invariant (one id per schema): every change is one commit that expects an unchanged head of the registry. One of
several racing changes wins and the others decide again, so one schema registered by many nodes has one id and one
version.

Invariant (changes count once): the head holds the nonces of the newest changes. A process that did not learn the
outcome of its change finds its nonce there, or knows that the change was not written and never will be.
"""
