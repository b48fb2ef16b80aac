"""The workers of the fleet: their registry, and their services API."""
