"""views: pure functions from reports, rows of the catalogue and states of tables to plain values.

    reports, rows, states ─► stages, captures, tables, pipelines, dead_letters ─► `tidemill … --json`, /api/…
                         └─► flow, problems, events ─► the node's page

Invariant: the command line and the HTTP API return the same structs, because both take them from here.
Views read no store and no clock, and format nothing for people, except sentences about problems.
"""
