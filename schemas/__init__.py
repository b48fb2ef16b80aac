"""inferbus."""
