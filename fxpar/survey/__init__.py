"""Which families of models train on meshes as on one process: tiny random models of all, tried one after another."""
