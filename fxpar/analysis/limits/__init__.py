"""What limits a step: one file for each kind of reason, which says in words what it costs and what would change it."""
