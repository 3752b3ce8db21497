"""Forwards by TensorRT engines, as far as torch-tensorrt has converters for their ops; Inductor compiles the rest."""
