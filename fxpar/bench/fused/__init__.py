"""`fxpar bench fused`: how much of a collective a matmul beside it hides, where both are one op."""
