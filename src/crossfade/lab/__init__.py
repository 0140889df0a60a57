"""The lab: every replacement method on real models and data, over seeds, with an honest report.

`crossfade run` is its command line; docs/lab.md is its guide. Nothing here is imported by the core.
"""
