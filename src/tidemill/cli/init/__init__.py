"""`tidemill init`: the files of a new cluster for an existing database.

command ─► capture's inspection of the database ─► plan (names, the derived table) ─► files (their text) ─► disk
"""
