"""How bytes move between ranks: channels of shared memory, relays and groups of gloo or NCCL."""
