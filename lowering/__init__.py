"""Lowerings: each turns a rank's local ATen graph into a callable.

The symlink fxpar/lowering makes this folder the package fxpar.lowering, its only name in imports.
"""
