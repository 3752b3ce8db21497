"""`fxpar bench planner`: whether the mesh that a plan finds best is the best, of all that were run."""
