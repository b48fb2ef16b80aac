"""One guarded connection to NATS: the `Bus`, and what it is made of."""
