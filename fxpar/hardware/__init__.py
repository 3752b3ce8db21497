"""Data about machines: clusters with their rates and latencies, and networks."""
