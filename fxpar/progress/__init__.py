"""What goes on while a model is distributed and compiled, for people who wait: on the terminal, and in the log."""
