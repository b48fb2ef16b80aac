"""Prefill and decode: who is here, whom to pick, the hand-off, and the two legs of a choice."""
