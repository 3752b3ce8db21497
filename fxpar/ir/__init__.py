"""The values that passes take and return: layouts, stages, plans, captured graphs, and the metadata of nodes."""
