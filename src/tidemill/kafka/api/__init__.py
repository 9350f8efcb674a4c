"""Between the wire and the handlers: dispatch, authorization, shared context.

    request ─► dispatch (which handler, which version) ─► required_operations ─► authorizer ─► handler ─► response

Owns the table of APIs and what each of them requires. Handlers are in `handlers`, one file per API key.
"""
