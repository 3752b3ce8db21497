"""What was worked out once is kept: on disk for later launches, and for the other ranks of this one."""
