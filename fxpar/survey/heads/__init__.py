"""How the models of each library are made small, and called."""
