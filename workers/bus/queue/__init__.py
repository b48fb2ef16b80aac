"""The queue that durable jobs are pulled from, and their deliveries."""
