"""The fused ops on CPUs: ranks of one host read factors from, and write products into, each other's memory."""

from fxpar.lowering.cpu.all_gather_matmul import all_gather_matmul
from fxpar.lowering.cpu.matmul_all_reduce import matmul_all_reduce
from fxpar.lowering.cpu.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
