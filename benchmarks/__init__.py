"""What inferbus costs, measured beside what it stands on: `python -m benchmarks`.

See benchmarks/README.md.
"""
