"""What a dumped step takes its time for: its facts, simulated and measured timelines, and what limits it."""
