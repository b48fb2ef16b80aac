"""The delivery contract: attempts, replies, results, cancellation, deadlines, dead letters.

Nothing here knows SGLang, and nothing knows NATS beyond `inferbus.workers.bus.interface`.
"""
