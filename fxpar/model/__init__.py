"""What `distribute` does to a model: logical parameters, their shards, the plan, state dicts."""
