"""`fxpar bench reshard`: the time of resharding between meshes, simulated, on emulated hosts, or on a real network."""
