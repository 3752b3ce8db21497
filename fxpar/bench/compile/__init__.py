"""`fxpar bench compile`: from the launch of a program to its second step, and the time of the passes at scale."""
