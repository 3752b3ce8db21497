"""Pipeline schedules: action lists, the programs they lower to, and what can be proved and predicted."""

from fxpar.schedule.action import Action, Kind, parse_action
from fxpar.schedule.build import DELAYED, INTERLEAVED, SCHEDULE_NAMES, build_schedule, weight_delays
from fxpar.schedule.checker import check_programs
from fxpar.schedule.instruction import Complete, Compute, Free, Instruction, PostReceive, Reduce, Send, Wait
from fxpar.schedule.program import Program, lower
from fxpar.schedule.schedule import Schedule, forward_only, peak_in_flight
from fxpar.schedule.simulator import Timeline, simulate
from fxpar.schedule.torch_csv import read_csv, write_csv
from fxpar.schedule.transfer import Edge, Routes, Transfer, chain

__all__ = [
    "DELAYED",
    "INTERLEAVED",
    "SCHEDULE_NAMES",
    "Action",
    "Complete",
    "Compute",
    "Edge",
    "Free",
    "Instruction",
    "Kind",
    "PostReceive",
    "Program",
    "Reduce",
    "Routes",
    "Schedule",
    "Send",
    "Timeline",
    "Transfer",
    "Wait",
    "build_schedule",
    "chain",
    "check_programs",
    "forward_only",
    "lower",
    "parse_action",
    "peak_in_flight",
    "read_csv",
    "simulate",
    "weight_delays",
    "write_csv",
]
