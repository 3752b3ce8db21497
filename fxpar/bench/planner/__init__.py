"""`fxpar bench planner`: whether the mesh with the best predicted time is the fastest of all measured ones."""
