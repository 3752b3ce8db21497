"""Timing that a busy machine does not mislead."""
