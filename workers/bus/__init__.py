"""NATS: the guarded connection, streams, the pull loop, the registry and the services API."""
