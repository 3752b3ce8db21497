"""Lowerings: each turns a rank's local ATen graph into a callable.

This folder is the package ``fxpar.lowering`` (by the symlink ``fxpar/lowering``), and is imported under that name only.
"""
