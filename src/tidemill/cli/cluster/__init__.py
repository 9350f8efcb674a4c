"""The cluster as a whole: run it (`up`), see it (`status`, `why`), check it (`doctor`), restore it (`restore`)."""
