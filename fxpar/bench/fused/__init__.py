"""`fxpar bench fused`: how much of a collective is hidden if it is fused with the matmul next to it."""
