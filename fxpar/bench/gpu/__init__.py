"""`fxpar bench gpu`: a training step on one GPU, against torch.compile of the same model."""
