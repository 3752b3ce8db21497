"""The search for a plan: mesh, schedule and number of microbatches."""
