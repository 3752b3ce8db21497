"""Layouts that are fixed rather than searched: of parameters, and of edges between stages."""
