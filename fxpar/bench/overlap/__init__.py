"""`fxpar bench overlap`: how much communication overlaps with computation, as rules of overlap are added one by one."""
