"""The processes of a run: the mesh, hosts, starting ranks, and what ranks must agree on."""
