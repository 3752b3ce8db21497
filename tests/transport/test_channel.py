"""Messages arrive in order and unchanged, whoever is late; a lost peer is an error, and memory is used again."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from fxpar.errors import PeerLostError, PlanMismatchError, SharedMemoryError
from fxpar.transport.channel import ChannelMessage, ChannelReader, ChannelWriter
from fxpar.transport.shared_segment import OwnSegment, PeerSegment
from fxpar.world.launch import run_ranks
from tests.transport import pass_messages
from tests.transport.pass_messages import NEVER_S, SIZES, content, receive, send

MIB = 1 << 20


class Loop:
    """A segment with channels whose ends are all in this process."""

    def __init__(self, num_bytes: int = 1 << 30) -> None:
        self.own = OwnSegment(num_bytes)
        self.peer = PeerSegment(7, self.own.found_at)

    def channel(self) -> tuple[ChannelWriter, ChannelReader]:
        """A new channel's ends."""
        writer = ChannelWriter("the toy", self.own, [self.peer])
        return writer, ChannelReader("the toy", self.peer, writer.place, 0)


def test_everyone_sends_to_everyone_and_all_arrives_unchanged() -> None:
    assert run_ranks(3, pass_messages.all_to_all, 40, timeout_s=60) == [[], [], []]


def test_readers_may_lag_behind_and_read_backwards() -> None:
    rounds = 3
    committed, *changed = run_ranks(3, pass_messages.lag_behind, 50, rounds, timeout_s=60)
    assert changed == [[], []]
    assert committed[0] >= sum(content(0, number).numel() for number in range(50)), "all were held at once"
    assert committed == [committed[0]] * rounds


def test_memory_does_not_grow_after_the_first_messages() -> None:
    held = 3
    committed, _ = run_ranks(2, pass_messages.keep_pace, 120, held, timeout_s=60)
    assert committed[2 * len(SIZES) :] == [committed[-1]] * (120 - 2 * len(SIZES)), committed
    assert committed[-1] <= 2 * sum(sorted(SIZES)[-held - 1 :]), "no more than what is on its transport at once needs"


def test_a_message_can_be_read_as_far_as_it_is_published_and_no_further() -> None:
    ends = [1, 2, 64, 100, 4096, 100_000, 100_001]
    _, *right = run_ranks(3, pass_messages.in_pieces, ends, timeout_s=60)
    assert right == [[True] * len(ends)] * 2


def test_a_writer_that_dies_in_mid_message_is_a_lost_peer_even_before_it_is_reaped() -> None:
    [(error, half, state)] = run_ranks(1, pass_messages.lose_the_writer, timeout_s=60)
    assert error.startswith("lost rank 5 while moving message 0 of the toy: its process has ended"), error
    assert half == [0, 1, 2, 3]
    assert state == "Z"


def test_a_writer_whose_reader_died_is_told_and_does_not_wait() -> None:
    [(num_begun, error)] = run_ranks(1, pass_messages.lose_the_reader, timeout_s=60)
    assert num_begun == 3
    assert error.startswith("lost rank 5 while moving message 1 of the toy: its process has ended"), error


def test_what_never_comes_is_waited_for_asleep_until_the_time_is_over() -> None:
    _, (error, elapsed, running) = run_ranks(2, pass_messages.wait_in_vain, timeout_s=60)
    assert error.startswith("lost rank 0 while moving message 0 of the channel of 0: timed out"), error
    assert running < 0.1 * elapsed, f"ran for {running} s of {elapsed} s"


def test_channels_of_a_rank_leave_their_memory_to_each_other() -> None:
    loop = Loop()
    for _ in range(5):
        writer, reader = loop.channel()
        send(writer, torch.zeros(3 * MIB, dtype=torch.uint8))
        receive(reader, 3 * MIB)
    assert loop.own.heap.committed_bytes < 6 * MIB


def test_all_that_was_sent_is_free_again_but_the_place_of_the_last() -> None:
    loop = Loop()
    writer, reader = loop.channel()
    send(writer, torch.zeros(0, dtype=torch.uint8))
    in_use = loop.own.heap.bytes_in_use
    for _ in range(20):
        receive(reader, 0)
        send(writer, torch.zeros(0, dtype=torch.uint8))
    assert loop.own.heap.bytes_in_use <= in_use + 64


def test_threads_may_wait_for_messages_in_any_order_and_publish_others() -> None:
    writer, reader = Loop().channel()
    count = 8
    arrivals = [reader.receive(1000) for _ in range(count)]
    received: dict[int, bool] = {}

    def read(number: int) -> None:
        data = arrivals[number].wait(1000, NEVER_S)
        received[number] = bool((data == number).all())
        arrivals[number].release()

    readers = [Thread(target=read, args=(number,), daemon=True) for number in reversed(range(count))]
    for thread in readers:
        thread.start()
    messages = [writer.begin(1000) for _ in range(count)]
    for message in messages:
        message.buffer.fill_(message.number)

    for message in messages:
        Thread(target=_publish_in_pieces, args=(message,), daemon=True).start()
    for thread in readers:
        thread.join()
    assert received == dict.fromkeys(range(count), True)


def _publish_in_pieces(message: ChannelMessage) -> None:
    for end in range(100, 1001, 100):
        message.publish(end)


def test_a_message_of_another_size_than_planned_is_an_error_before_a_byte_is_read() -> None:
    writer, reader = Loop().channel()
    writer.begin(8)
    with pytest.raises(PlanMismatchError, match="message 0 of the toy: rank 7 sends 8 bytes, this rank expects 16"):
        reader.receive(16).wait(0, NEVER_S)


def test_a_writer_that_cannot_go_on_tells_its_readers() -> None:
    writer, reader = Loop().channel()
    message = writer.begin(8)
    message.publish(4)
    arrival = reader.receive(8)
    assert arrival.wait(4, NEVER_S).shape == (4,)
    message.fail()
    with pytest.raises(PeerLostError, match="lost rank 7 while moving message 0 of the toy: it cannot send the rest"):
        arrival.wait(8, NEVER_S)


def test_a_whole_message_cannot_fail_any_more() -> None:
    writer, reader = Loop().channel()
    message = writer.begin(8)
    message.publish(8)
    message.fail()
    assert receive(reader, 8).shape == (8,)


def test_a_writer_whose_readers_never_release_gets_an_error_and_does_not_wait() -> None:
    writer, _ = Loop(4 * MIB).channel()
    with pytest.raises(SharedMemoryError, match="allocate"):
        for _ in range(5):
            send(writer, torch.zeros(MIB, dtype=torch.uint8))


def test_what_was_published_is_not_taken_back() -> None:
    writer, _ = Loop().channel()
    message = writer.begin(8)
    message.publish(4)
    for wrong in (3, 9):
        with pytest.raises(AssertionError, match=f"message 0 of 8 bytes: {wrong} published after 4"):
            message.publish(wrong)


def test_a_message_is_released_once_and_after_it_was_found() -> None:
    writer, reader = Loop().channel()
    send(writer, torch.zeros(8, dtype=torch.uint8))
    arrival = reader.receive(8)
    with pytest.raises(AssertionError, match="message 0 of the toy was released before, or never waited for"):
        arrival.release()
    arrival.wait(8, NEVER_S)
    arrival.release()
    with pytest.raises(AssertionError, match="message 0 of the toy was released before"):
        arrival.release()
    with pytest.raises(AssertionError, match="message 0 of the toy was released"):
        arrival.wait(8, NEVER_S)
