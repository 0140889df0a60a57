"""A package, so that `from tests... import ...` never finds another project's folder of that name."""
