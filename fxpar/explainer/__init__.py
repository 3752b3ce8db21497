"""`fxpar explain`: what a training step costs, what bounds it, and which changes would help most."""
