"""How bytes move between ranks: shared memory within a host, gloo messages between hosts, NCCL process groups."""
