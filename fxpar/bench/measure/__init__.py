"""Timing that is robust on a busy machine."""
