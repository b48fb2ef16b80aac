"""JetStream: its API, the streams and consumers of the contract, and looking through them."""
