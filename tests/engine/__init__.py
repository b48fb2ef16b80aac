"""A package, so that its engines, which take gigabytes, end with its last test and not with the session."""
