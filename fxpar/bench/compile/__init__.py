"""`fxpar bench compile`: from the launch of a program to its second step."""
