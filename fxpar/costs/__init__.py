"""Prices of computation and communication, after the performance model of Singh et al."""
