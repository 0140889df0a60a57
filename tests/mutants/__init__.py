"""Wrong implementations on purpose, each of which a named test must notice."""
