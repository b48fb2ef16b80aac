"""Batch files: any number of requests in, one line for each out, whatever dies meanwhile.

See docs/batch.md.
"""
