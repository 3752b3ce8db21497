"""The rehearsal of a step: its first microbatches, in an order in which no rank waits for what it itself has yet to do.

A GPU's first launch of a kernel may wait until all kernels that run there have ended (CUDA C++ Programming Guide, "Lazy
Loading"). Over NCCL, a posted receive is such a kernel, and ends when its sender has sent: if the sender waits for this
rank in turn, both wait for ever. So before the first step, all that it launches is launched in a rehearsal, where one
action at a time is computed in all stages, and a receive is posted only after its sender's action.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from fxpar.schedule.action import Action
from fxpar.schedule.instruction import Compute, Free, Instruction, PostReceive, Reduce, Send, Wait
from fxpar.schedule.program import Program
from fxpar.schedule.transfer import Transfer

_MICROBATCHES = 2
"""From the second one on, gradients are added to those of the ones before."""

_Moment: TypeAlias = tuple[int, int, int]
"""When an action is computed in a rehearsal: by microbatch, then all forwards, backwards and gradients of weights."""

_WAIT, _COMPUTE, _POST, _SEND, _FREE = range(5)
"""The order of what belongs to one action; a rank that it receives from itself posts before it sends."""


def rehearsal(program: Program) -> Program:
    """The instructions of the rehearsal of a rank's `program`; those of all ranks together end."""
    stages: defaultdict[bool, set[int]] = defaultdict(set)
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            stages[instruction.action.kind != "F"].add(instruction.action.stage)
    placed: list[tuple[_Moment, int, Instruction]] = []
    for instruction in program.instructions:
        match instruction:
            case Compute(action):
                placed.append((_moment(action), _COMPUTE, instruction))
            case Free(action):
                placed.append((_moment(action), _FREE, instruction))
            case PostReceive(transfer):
                placed.append((_sent_at(transfer), _POST, instruction))
            case Send(transfer):
                placed.append((_sent_at(transfer), _SEND, instruction))
            case Wait(transfer):
                placed.append((_needed_at(transfer, stages[transfer.is_backward]), _WAIT, instruction))
    placed.sort(key=lambda each: each[:2])
    rehearsed = [instruction for (microbatch, _, _), _, instruction in placed if microbatch < _MICROBATCHES]
    reductions = [instruction for instruction in program.instructions if isinstance(instruction, Reduce)]
    return Program(program.rank, (*rehearsed, *reductions))


def _moment(action: Action) -> _Moment:
    phase = {"F": 0, "B": 1, "I": 1, "W": 2}[action.kind]
    return action.microbatch, phase, action.stage if phase == 0 else -action.stage


def _sent_at(transfer: Transfer) -> _Moment:
    return _at(transfer, transfer.source)


def _needed_at(transfer: Transfer, stages: set[int]) -> _Moment:
    """When the first of a rank's `stages` needs it."""
    return min(_at(transfer, target) for target in transfer.targets if target in stages)


def _at(transfer: Transfer, stage: int) -> _Moment:
    return _moment(Action(stage, "B" if transfer.is_backward else "F", transfer.microbatch))
