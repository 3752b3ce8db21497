"""What passes have in common: reading and rewriting FX graphs."""
