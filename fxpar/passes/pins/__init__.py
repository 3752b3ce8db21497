"""Layouts that are given rather than searched: of parameters, and of values that cross stages."""
