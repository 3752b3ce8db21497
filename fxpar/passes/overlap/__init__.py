"""Orders of ops in which collectives run concurrently with computation."""
