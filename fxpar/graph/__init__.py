"""Reading and rewriting of FX graphs, shared by passes."""
