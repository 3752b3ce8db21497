"""The fused ops on CUDA devices: Triton kernels over symmetric memory, fed by the copy engine.

Nothing here is imported before it is wanted: fxpar itself needs no Triton. Where there is none, or no symmetric memory,
the ops remain what they are by definition: a collective and a matmul, one after the other.
"""
