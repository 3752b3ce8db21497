"""What `trace_joint` consists of: cuts between layers, the trace of a piece, and pieces joined again."""
