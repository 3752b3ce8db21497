"""Which ops are decomposed, and into what."""
