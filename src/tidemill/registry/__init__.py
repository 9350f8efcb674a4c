"""registry: schemas by subject and version, Confluent's REST interface over the metastore, on every node.

Owns what a schema means, when two are compatible, and the HTTP routes (`http`). Does not own the rows' layout
(metastore), nor the server that carries the routes.

RG4  Every change is one commit that expects the registry's head as it was read: of racing changes one wins and the
    others look again, so one schema registered by many nodes has one id and one version.
RG5  A change counts once: the head holds the nonces of the newest changes, so whoever was never told an outcome
     finds it there, or knows that it did not land and never will.
"""
