"""What runs a step: transport between stages, the executor, and the callable and results that the user gets."""
