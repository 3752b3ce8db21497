"""The cost of a transfer is what its plan says of every interface that it takes."""

import pytest
import torch

from fxpar.costs.transfer_costs import plan_cost, transfer_costs
from fxpar.hardware.network import LOOPBACK, Network
from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port, PortKind
from fxpar.resharding.pipeline import Crossing, Reshard
from fxpar.resharding.plan import make_plan
from fxpar.resharding.tile import Tile
from fxpar.schedule import Edge, Routes
from fxpar.schedule.action import Action

NETWORK = Network(bytes_per_us=10.0, chunk_us=2.0)
WHOLE = Tile((((0, 1000),),))


def _halves() -> tuple[Tile, Tile]:
    return Tile((((0, 500),),)), Tile((((500, 1000),),))


def test_a_message_occupies_one_interface_out_and_one_in() -> None:
    plan = make_plan({0: WHOLE}, {1: WHOLE}, 4, (0, 1), network=NETWORK)
    cost = plan_cost(plan, NETWORK)
    assert cost.time_us == plan.time_us(NETWORK) == 402
    assert cost.busy_us == {"host 0 sends": 402, "host 1 receives": 400}


def test_a_chain_occupies_the_interfaces_of_those_who_pass_it_on() -> None:
    plan = make_plan({0: WHOLE}, {1: WHOLE, 2: WHOLE}, 4, (0, 1, 2), network=NETWORK)
    cost = plan_cost(plan, NETWORK)
    chunks = plan.relays[0].num_chunks
    assert chunks > 1
    first, second = plan.relays[0].path[1:]
    assert cost.busy_us == {
        "host 0 sends": 400 + 2 * chunks,
        f"host {first} receives": 400,
        f"host {first} sends": 400 + 2 * chunks,
        f"host {second} receives": 400,
    }
    assert 400 + 2 * chunks < cost.time_us < 2 * 400


def test_senders_of_one_host_share_its_interface() -> None:
    first, second = _halves()
    plan = make_plan({0: first, 1: second}, {2: first, 3: second}, 4, (0, 0, 1, 2), network=NETWORK)
    cost = plan_cost(plan, NETWORK)
    assert cost.busy_us == {"host 0 sends": 404, "host 1 receives": 200, "host 2 receives": 200}
    assert cost.time_us == pytest.approx(404)


def test_inside_a_host_no_interface_is_busy_but_copying_takes_time() -> None:
    plan = make_plan({0: WHOLE}, {1: WHOLE}, 4, (0, 0), network=NETWORK)
    cost = plan_cost(plan, NETWORK)
    assert cost.busy_us == {}
    assert cost.time_us == 4000 / LOOPBACK.bytes_per_us + LOOPBACK.chunk_us


def test_what_its_rank_already_holds_takes_no_time() -> None:
    cost = plan_cost(make_plan({0: WHOLE}, {0: WHOLE}, 4, (0,), network=NETWORK), NETWORK)
    assert (cost.time_us, cost.busy_us) == (0.0, {})


def _reshard(name: str, kind: PortKind, source: int, *targets: int) -> Reshard:
    layout = Layout((1000,))
    crossing = Crossing(
        Port(kind, name), source > targets[0], source, targets, layout, (layout,) * len(targets), torch.float32
    )
    plan = make_plan({source: WHOLE}, dict.fromkeys(targets, WHOLE), 4, (0, 1, 2), network=NETWORK)
    return Reshard(crossing, plan)


def test_costs_are_by_the_routes_that_transfers_take() -> None:
    """Tied parameters move once per step: no transfer of a schedule."""
    reshards = [
        _reshard("skip", PortKind.EDGE, 0, 1, 2),
        _reshard("skip", PortKind.EDGE, 1, 0),
        _reshard("skip", PortKind.EDGE, 2, 0),
        _reshard("weight", PortKind.PARAMETER, 0, 2),
    ]
    routes = Routes((Edge("skip", 0, (1, 2)),), (0, 1, 2))
    actions = Action(0, "F", 0), Action(1, "B", 0), Action(2, "I", 0)
    sent = [transfer for action in actions for transfer in routes.sent(action)]
    costs = transfer_costs(reshards, NETWORK)
    assert list(costs) == [(transfer.edge, transfer.source, transfer.targets) for transfer in sent]
    assert list(costs.values()) == [plan_cost(reshard.plan, NETWORK) for reshard in reshards[:3]]
