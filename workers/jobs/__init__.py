"""The delivery contract: attempts, replies, results, cancellation, deadlines, dead letters.

It knows no SGLang, and of NATS only `inferbus.workers.bus.interface` and the streams' names in `bus.layout`.
"""
