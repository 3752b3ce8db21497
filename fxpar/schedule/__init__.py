"""Pipeline schedules: action lists, the programs they lower to, and what can be proved and predicted."""

from fxpar.schedule.action import Action, Kind, parse_action
from fxpar.schedule.build import (
    DELAYED,
    INTERLEAVED,
    NAMED_SCHEDULES,
    SCHEDULE_NAMES,
    build_schedule,
    named_schedule,
    weight_delays,
)
from fxpar.schedule.checker import check_programs
from fxpar.schedule.costs import Costs, TransferCost, uniform_costs
from fxpar.schedule.few_microbatches import few_microbatches_warning
from fxpar.schedule.instruction import Complete, Compute, Free, Instruction, PostReceive, Reduce, Send, Wait
from fxpar.schedule.memory import MEMORY_HEADER, RankMemory, StageMemory, check_memory
from fxpar.schedule.message import Message, Messages
from fxpar.schedule.peak_memory import ActionMemory, memory_by_action, peak_memory
from fxpar.schedule.program import Program, lower
from fxpar.schedule.read_schedule import GivenSchedule, check_fits, read_schedule, schedule_text
from fxpar.schedule.rehearsal import rehearsal
from fxpar.schedule.schedule import Schedule, check_trains, forward_only, peak_in_flight
from fxpar.schedule.simulator import simulate
from fxpar.schedule.timeline import Span, Timeline
from fxpar.schedule.torch_csv import read_csv, write_csv
from fxpar.schedule.transfer import Edge, Routes, Transfer, chain

__all__ = [
    "DELAYED",
    "INTERLEAVED",
    "MEMORY_HEADER",
    "NAMED_SCHEDULES",
    "SCHEDULE_NAMES",
    "Action",
    "ActionMemory",
    "Complete",
    "Compute",
    "Costs",
    "Edge",
    "Free",
    "GivenSchedule",
    "Instruction",
    "Kind",
    "Message",
    "Messages",
    "PostReceive",
    "Program",
    "RankMemory",
    "Reduce",
    "Routes",
    "Schedule",
    "Send",
    "Span",
    "StageMemory",
    "Timeline",
    "Transfer",
    "TransferCost",
    "Wait",
    "build_schedule",
    "chain",
    "check_fits",
    "check_memory",
    "check_programs",
    "check_trains",
    "few_microbatches_warning",
    "forward_only",
    "lower",
    "memory_by_action",
    "named_schedule",
    "parse_action",
    "peak_in_flight",
    "peak_memory",
    "read_csv",
    "read_schedule",
    "rehearsal",
    "schedule_text",
    "simulate",
    "uniform_costs",
    "weight_delays",
    "write_csv",
]
