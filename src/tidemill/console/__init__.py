"""console: the browser's view of a node: the status API and the page of the demo.

    published statuses ─► report ─► JSON of /api/status ─► page

Owns static files (vendored libraries with their licences, no build step) and the read-only JSON that `status`, `why`
and the page share. Owns no state: everything is derived from published statuses.
"""
