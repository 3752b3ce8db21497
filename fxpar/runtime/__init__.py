"""What runs a step: transport between stages, the executor, and what the user is handed."""
