"""What decides which ops are decomposed, and into what."""
