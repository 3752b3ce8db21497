"""`fxpar bench reshard`: what moving tensors between meshes takes, in thought, on emulated hosts, or as it is."""
