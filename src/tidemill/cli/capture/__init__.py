"""`tidemill capture`: captures, their tables, and accepted schema changes."""
