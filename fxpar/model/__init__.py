"""What `distribute` does to a model: logical parameters, shards, buffers, state dicts of model and optimizers."""
