"""`fxpar bench reshard`: what moving tensors between meshes takes: simulated, on emulated hosts, or as it is."""
