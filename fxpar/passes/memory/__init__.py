"""The memory that a stage takes, and when."""
