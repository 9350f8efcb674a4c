"""access: who somebody is, and what they may do. One set of rules for every server of a node.

Owns: principals and how a certificate names one, users and their credentials, SASL mechanisms, tokens, rules and what
follows from them, quotas, TLS contexts and their renewal, audit lines. Does not own: any wire protocol (`kafka`,
`node`), nor what a topic, a group or a shape is.

Everything that decides is pure; what waits reads and writes rows of the metastore, or files.
"""
