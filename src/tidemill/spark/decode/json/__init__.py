"""What JSON values mean for a declared schema: as Arrow's reader reads them in blocks (`dialect`), and the values of
nested columns (`nested_values`)."""
