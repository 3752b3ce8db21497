"""Weights of a distributed model from and to files that the model of one process reads: safetensors, in a folder."""
