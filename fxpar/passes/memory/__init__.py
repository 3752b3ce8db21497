"""What a stage holds in memory, and when."""
