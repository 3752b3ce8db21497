"""Hosts emulated by network namespaces of this machine."""
