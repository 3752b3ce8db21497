"""`fxpar bench step`: what a training step costs, from choosing layouts to running it."""
