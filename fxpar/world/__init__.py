"""The processes of a run: the mesh, hosts, starting ranks, and checks that ranks agree."""
