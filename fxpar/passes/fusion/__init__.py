"""Fusion of matmuls and collectives into one op, and its estimated cost."""
