"""Moving a tensor from the ranks and layout of one mesh to those of another."""

from fxpar.reshard.units import Message, UnitTask, local_slices, point_to_point, unit_tasks

__all__ = ["Message", "UnitTask", "local_slices", "point_to_point", "unit_tasks"]
