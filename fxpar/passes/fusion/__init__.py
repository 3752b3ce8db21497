"""Matmuls and collectives that become one op, and whether that is worth it."""
