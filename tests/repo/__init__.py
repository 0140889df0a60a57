"""Tests of the repository itself: structure, imports, public names, documentation, packaging."""
