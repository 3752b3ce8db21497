"""Orders of ops by which collectives run beside computation."""
