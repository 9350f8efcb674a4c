"""security: authentication, authorization, quotas and TLS, with one set of rules for every server of a node.

    certificate, SASL, token ─► principals ─► acls (acl_cache) ─► allow or deny ─► audit
    quotas: usage of one client;  sasl: also delays after failed attempts

Owns principals and their mapping from certificates, users and their credentials, SASL mechanisms, tokens, ACLs, quotas,
TLS contexts and their renewal, audit log lines. Does not own a wire protocol (`kafka`, `node`) or the meaning of a
topic, a group or a shape.

Decisions are pure functions; asynchronous code only reads and writes metastore rows or files.
"""
