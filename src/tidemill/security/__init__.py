"""security: authentication, authorization, quotas and TLS, with one set of rules for every server of a node.

    certificate, SASL, token ─► principals ─► acls (acl_cache) ─► allow or deny ─► audit
    quotas (quota_cache);  auth_throttle: delay after failed attempts

Owns principals and how a certificate names one, users and their credentials, SASL mechanisms, tokens, ACLs, quotas, TLS
contexts and their renewal, audit lines. Does not own a wire protocol (`kafka`, `node`), or what a topic, a group or a
shape is.

Decisions are pure; asynchronous code only reads and writes rows of the metastore, or files.
"""
