"""How stages are cut, and what crosses from one to another."""
