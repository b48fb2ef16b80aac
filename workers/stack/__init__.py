"""A whole inferbus on one machine: embedded NATS server, demo model, local worker processes.

`make demo`, `inferbus up` and the tests are built from these parts. Importing the package needs neither torch
nor SGLang; only `models` loads torch, and only while it converts weights.
"""
