"""Pipeline schedules: action lists, the programs they lower to, and what can be proved and predicted."""

from fxpar.schedule.action import Action, Kind, parse_action
from fxpar.schedule.build import SCHEDULE_NAMES, build_schedule
from fxpar.schedule.checker import check_programs
from fxpar.schedule.program import Compute, Free, Instruction, PostReceive, Program, Send, Wait, lower
from fxpar.schedule.schedule import Schedule, forward_only, peak_in_flight
from fxpar.schedule.simulator import Timeline, simulate
from fxpar.schedule.torch_csv import read_csv, write_csv
from fxpar.schedule.transfer import Edge, Routes, Transfer, chain

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Compute",
    "Edge",
    "Free",
    "Instruction",
    "Kind",
    "PostReceive",
    "Program",
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
    "write_csv",
]
