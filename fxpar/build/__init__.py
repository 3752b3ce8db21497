"""What `build_step` connects: the plan that all ranks share, and the graphs and the program of this one."""
