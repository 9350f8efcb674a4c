"""Layer between the wire and the handlers: dispatch, authorization and shared context.

    request ─► dispatch (which handler, which version) ─► required_operations ─► authorizer ─► handler ─► response

This package owns the table of APIs and the operations that each requires. Handlers are in `handlers`, in
files named by API keys.
"""
