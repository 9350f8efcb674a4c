"""Pages of the documentation as programs: their blocks, in order."""
