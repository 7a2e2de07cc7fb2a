"""Carried trajectories, several ranks in one process, and the draws that make a trajectory from its serial number."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from pdd.carry import Reserve, TrajectoryCarry, merge, stagger_offset, uncovered_rungs
from pdd.draws import Shuffle, generator_for, noise

# rungs, slots, batch, ranks
SHAPES = [(8, 1, 1, 1), (8, 1, 3, 1), (8, 2, 3, 2), (4, 3, 2, 4), (3, 4, 2, 5), (1, 2, 2, 2), (5, 1, 16, 1)]
EACH = pytest.mark.parametrize("shape", SHAPES, ids=str)
STAGGER = pytest.mark.parametrize("stagger", ["stream", "sample"])


def ranks_of(shape, stagger) -> list[TrajectoryCarry]:
    rungs, slots, batch, world = shape
    return [TrajectoryCarry(rungs, slots, batch, rank, world, stagger) for rank in range(world)]


class World:
    """States that say which trajectory they are and how far it has come: ``x = serial``, ``y = rungs walked``."""

    def __init__(self):
        self.forwards, self.walked = 0, []

    def fresh(self, serials):
        return {"x": serials[:, None].double(), "y": torch.zeros(len(serials), 2, 2)}

    def advance(self, state, serials, rung):
        self.forwards += 1
        self.walked.append(rung)
        assert torch.equal(state["x"][:, 0], serials.double())
        assert (state["y"] == rung).all(), "each forward of the pre-walk starts from the rung that it says"
        return {"x": state["x"], "y": state["y"] + 1}

    def step(self, carry, index):
        """One accumulation round: what was in the slot, and the student's move."""
        slot = carry.slot(index, self.fresh, self.advance)
        carry.commit(index, {"x": slot.state["x"], "y": slot.state["y"] + 1}, self.fresh)
        return slot


# ---------------------------------------------------------------------------------------------------- rungs


@EACH
@STAGGER
def test_every_sample_climbs_rung_by_rung_and_keeps_its_trajectory(shape, stagger):
    """The serial number, which decides noise and prompt, lasts a trajectory's life and is never used again."""
    rungs, slots, batch, world = shape
    used = []
    for carry in ranks_of(shape, stagger):
        for index in range(slots):
            simulator, previous, visited = World(), None, set()
            for _ in range(3 * rungs + 1):
                slot = simulator.step(carry, index)
                serials = slot.serial
                assert slot.state["x"].shape == (batch, 1)
                assert torch.equal(slot.state["x"][:, 0], serials.double())
                assert (slot.state["y"] == slot.rung.view(-1, 1, 1)).all(), "a state is where its rung says"
                for row in range(batch):
                    rung, serial = int(slot.rung[row]), int(serials[row])
                    visited.add((row, rung))
                    if previous is None:
                        assert rung == carry.offsets(index)[row] and serials[row] == carry.serials(index, 0)[row]
                        used.append(serial)
                    elif previous[0][row] == rungs - 1:
                        assert rung == 0 and serial > previous[1][row]
                        used.append(serial)
                    else:
                        assert rung == previous[0][row] + 1 and serial == previous[1][row]
                previous = slot.rung.tolist(), serials.tolist()
            assert visited == {(row, rung) for row in range(batch) for rung in range(rungs)}
    assert len(used) == len(set(used)), "over all ranks, slots and laps"
    assert sorted(used)[: slots * world * batch] == list(range(slots * world * batch)), "and none is left out"


@EACH
@STAGGER
def test_the_pre_walk_issues_as_many_forwards_on_every_rank(shape, stagger):
    """ZeRO-3 hangs otherwise. The states themselves are advanced exactly as far as their offsets say."""
    rungs, slots, _, world = shape
    for index in range(slots):
        worlds = [World() for _ in range(world)]
        carries = ranks_of(shape, stagger)
        states = [carry.slot(index, w.fresh, w.advance) for carry, w in zip(carries, worlds)]
        farthest = max(int(carry.offsets(index).max()) for carry in carries)
        assert [w.walked for w in worlds] == [list(range(farthest))] * world
        for carry, slot, w in zip(carries, states, worlds):
            offsets = carry.offsets(index)
            assert torch.equal(slot.rung, offsets) and (slot.state["y"] == offsets.view(-1, 1, 1)).all()
            carry.slot(index, w.fresh, w.advance)
            assert w.forwards == farthest, "a slot that is filled needs no forward"


@EACH
@STAGGER
def test_first_starts_are_spread_over_the_rungs(shape, stagger):
    """As many different rungs as there can be, and none much more often than another."""
    rungs, slots, batch, world = shape
    carries = ranks_of(shape, stagger)
    offsets = torch.stack([torch.stack([c.offsets(i) for c in carries]) for i in range(slots)])  # [slots, ranks, B]
    if stagger == "stream":
        assert (offsets == offsets[..., :1]).all(), "one rung for a whole slot"
        offsets = offsets[..., :1]
    flat = offsets.flatten().tolist()
    assert all(0 <= o < rungs for o in flat)
    counts = [flat.count(o) for o in range(rungs)]
    assert len(set(flat)) == min(rungs, len(flat)) and max(counts) - min(counts) <= 1
    for rank in range(world):
        for index in range(slots):
            # the pre-walk counts on every rank knowing every other rank's offsets
            assert torch.equal(carries[0].offsets(index, rank), carries[rank].offsets(index))


def test_stagger_offsets_of_few_streams_leave_equal_gaps():
    assert [stagger_offset(i, 4, 8) for i in range(4)] == [0, 2, 4, 6]
    assert [stagger_offset(i, 3, 8) for i in range(3)] == [0, 2, 5]
    assert [stagger_offset(i, 10, 4) for i in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_global_batch_has_the_same_serials_and_offsets_on_any_number_of_ranks():
    for index in range(3):
        whole = TrajectoryCarry(8, 3, 12, 0, 1, "sample")
        for world in (2, 3, 4):
            parts = ranks_of((8, 3, 12 // world, world), "sample")
            for lap in (0, 5):
                laps = [torch.full((c.batch,), lap) for c in (whole, parts[0])]
                joined = torch.cat([c.serials(index, laps[1]) for c in parts])
                assert torch.equal(whole.serials(index, laps[0]), joined)
            assert torch.equal(whole.offsets(index), torch.cat([c.offsets(index) for c in parts]))


@EACH
@STAGGER
@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_uncovered_rungs_are_those_that_a_run_does_not_visit(shape, stagger, steps):
    rungs, slots, *_ = shape
    visited = set()
    for carry in ranks_of(shape, stagger):
        for index in range(slots):
            for _ in range(min(steps, 2 * rungs)):
                visited |= set(World.step(World(), carry, index).rung.tolist())
    assert uncovered_rungs(ranks_of(shape, stagger)[0], steps) == sorted(set(range(rungs)) - visited)


def test_one_short_run_of_one_stream_leaves_rungs_out():
    assert uncovered_rungs(TrajectoryCarry(8, 1, 4, 0, 1, "stream"), 5) == [5, 6, 7]
    assert uncovered_rungs(TrajectoryCarry(8, 1, 4, 0, 1, "sample"), 1) == [1, 3, 5, 7]
    assert uncovered_rungs(TrajectoryCarry(8, 2, 4, 0, 2, "stream"), 2) == []


# ---------------------------------------------------------------------------------------------------- save and resume


@STAGGER
def test_a_restored_carry_goes_on_as_if_nothing_had_happened(stagger):
    shape = (4, 3, 5, 2)
    carry, simulator = ranks_of(shape, stagger)[1], World()
    for step in range(6):
        for index in range(2):  # the third slot is still empty when the run is interrupted
            simulator.step(carry, index)
    saved = {name: tensor.clone() for name, tensor in carry.state_dict().items()}
    restored = ranks_of(shape, stagger)[1]
    other = ranks_of(shape, stagger)[0].state_dict()  # of a rank that is not this one
    assert restored.load_state_dict([other, carry.state_dict()], torch.device("cpu"), None) is None
    for step in range(9):
        for index in range(3):
            before, after = World(), World()
            a, b = before.step(carry, index), after.step(restored, index)
            assert torch.equal(a.rung, b.rung) and torch.equal(a.serial, b.serial)
            assert all(torch.equal(a.state[m], b.state[m]) and a.state[m].dtype == b.state[m].dtype for m in ("x", "y"))
            assert before.forwards == after.forwards
    third = ranks_of(shape, stagger)[1]
    third.load_state_dict([other, saved], torch.device("cpu"), None)
    assert {n: t.tolist() for n, t in third.state_dict().items()} == {n: t.tolist() for n, t in saved.items()}


def test_what_is_saved_is_flat_contiguous_and_without_a_graph():
    """As safetensors wants it."""
    carry = TrajectoryCarry(4, 1, 3, 0, 1)
    weight = torch.ones(2, 3, requires_grad=True)
    carry.slot(0, lambda serials: {"x": torch.zeros(3, 2)}, None)
    carry.commit(0, {"x": (weight * 2).T}, None)
    saved = carry.state_dict()
    assert set(saved) == {"0.state.x", "0.rung", "0.serial", "layout"}
    assert all(t.is_contiguous() and not t.requires_grad and t.device.type == "cpu" for t in saved.values())
    assert TrajectoryCarry(4, 2, 3, 0, 1).state_dict() == {}


def fresh_states(serials):
    return {"x": serials[:, None].double(), "y": torch.zeros(len(serials), 2, 2)}


@pytest.mark.parametrize(
    "world, slots, batch", [(1, 2, 3), (1, 2, 6), (2, 1, 6), (4, 1, 3), (1, 1, 5), (4, 2, 3), (2, 2, 7), (3, 3, 4)]
)
def test_trajectories_are_dealt_again_to_another_layout(world, slots, batch):
    """In order, each with its state, rung and serial number; nothing is invented, and no number is used twice."""
    old = ranks_of((4, 2, 3, 2), "sample")
    for carry in old:
        for index in range(2):
            for _ in range(7):
                World().step(carry, index)
    everything = {}
    for index in range(2):
        for carry in old:
            slot = carry.slots[index]
            for row in range(3):
                everything[int(slot.serial[row])] = (int(slot.rung[row]), float(slot.state["x"][row]))
    new = [TrajectoryCarry(4, slots, batch, rank, world, "sample") for rank in range(world)]
    total = world * slots * batch
    for carry in new:
        dealt = carry.load_state_dict([c.state_dict() for c in old], torch.device("cpu"), fresh_states)
        assert dealt == (min(12, total), total)
    going_on, first_rungs = [], []
    for index in range(slots):
        empty = {carry.slots[index] is None for carry in new}
        assert len(empty) == 1, "else some rank would walk to its staggered start alone"
        for carry in new if empty == {False} else []:
            slot = carry.slots[index]
            for row, serial in enumerate(slot.serial.tolist()):
                if serial in everything:
                    assert everything[serial] == (int(slot.rung[row]), float(slot.state["x"][row]))
                    going_on.append(serial)
                else:
                    assert slot.rung[row] == 0 and slot.state["x"][row] == serial > max(everything)
                    first_rungs.append(serial)
    assert going_on == list(everything)[: min(12, total)]
    used = [*everything, *first_rungs]
    for carry in new:  # from here on every number is new
        for index in range(slots):
            if carry.slots[index] is None:
                continue
            known = set(carry.slots[index].serial.tolist())
            for _ in range(9):
                carry.commit(index, carry.slots[index].state, fresh_states)
                used += [s for s in carry.slots[index].serial.tolist() if s not in known]
                known |= set(carry.slots[index].serial.tolist())
    assert len(used) == len(set(used))


def test_a_trajectory_that_is_no_longer_finite_restarts():
    carry = TrajectoryCarry(4, 1, 3, 0, 1)
    carry.slot(0, fresh_states, None)
    state = fresh_states(torch.tensor([0, 1, 2]))
    state["y"][1, 0] = float("nan")
    assert carry.commit(0, state, fresh_states).tolist() == [False, True, False]
    slot = carry.slots[0]
    assert slot.rung.tolist() == [1, 0, 1] and slot.serial.tolist() == [0, 4, 2]
    assert slot.state["x"][:, 0].tolist() == [0, 4, 2] and slot.state["y"].isfinite().all()


@STAGGER
def test_ranks_make_starting_states_together_about_once_in_as_many_rounds_as_rungs(stagger):
    """Whatever is lost; and each restart is that of a carry which makes its states alone."""
    shape, rounds = (4, 2, 3, 3), 21
    meet, flags = threading.Barrier(3, timeout=20), [0] * 3

    def climb(carry, rank, lose, reserve=None):
        seen = []
        for round in range(rounds):
            for index in range(2):
                slot = carry.slot(index, fresh_states, World().advance)
                state = {"x": slot.state["x"], "y": slot.state["y"] + 1}
                if (round, rank, index) in lose:
                    state["y"][0] = float("nan")
                carry.commit(index, state, fresh_states, reserve)
                seen += [carry.slots[index].serial.tolist(), carry.slots[index].state["x"][:, 0].tolist()]
        return seen

    def agreed(rank, flag):
        flags[rank] = flag
        meet.wait()
        largest = max(flags)
        meet.wait()
        return largest

    def together(rank, carry, lose):
        calls = []
        reserve = Reserve(lambda serials: calls.append(serials) or fresh_states(serials), partial(agreed, rank))
        return climb(carry, rank, lose, reserve), len(calls)

    for lose in ([], [(5, 0, 1), (6, 2, 0), (6, 0, 1)]):
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(together, range(3), ranks_of(shape, stagger), [lose] * 3))
        assert len({count for _, count in made}) == 1 and made[0][1] <= 2 * (rounds // 4 + 1) + len(lose)
        assert [seen for seen, _ in made] == [climb(c, rank, lose) for rank, c in enumerate(ranks_of(shape, stagger))]


def test_merge_chooses_sample_by_sample():
    a, b = {"x": torch.ones(3, 2), "y": torch.ones(3, 1, 4)}, {"x": torch.zeros(3, 2), "y": torch.zeros(3, 1, 4)}
    merged = merge(torch.tensor([True, False, True]), a, b)
    assert merged["x"].tolist() == [[1, 1], [0, 0], [1, 1]] and merged["y"][:, 0, 0].tolist() == [1, 0, 1]


# ---------------------------------------------------------------------------------------------------- draws


def test_equal_addresses_draw_equally_and_no_others_do():
    one = (0, "noise", 1)
    addresses = [one, (0, "noise", 2), (1, "noise", 1), (0, "targets", 1), (0, "noise", "1"), (*one, 0)]
    draws = [torch.rand(8, generator=generator_for(*address)) for address in addresses]
    for i, address in enumerate(addresses):
        assert torch.equal(draws[i], torch.rand(8, generator=generator_for(*address)))
        assert not any(torch.equal(draws[i], other) for other in draws[:i])


def test_draws_leave_the_global_generator_alone_and_do_not_read_it():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = noise((3, 4), 0, "image", 7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(noise((3, 4), 0, "image", 7), first)


def test_noise_is_standard_normal_float32_and_independent_between_samples():
    x = torch.stack([noise((64,), 0, "noise", "image", i) for i in range(400)])  # [400, 64]
    assert x.dtype == torch.float32 and x.shape == (400, 64)
    assert float(x.mean()) == pytest.approx(0, abs=0.02) and float(x.std()) == pytest.approx(1, abs=0.02)
    assert float((x[:-1] * x[1:]).mean()) == pytest.approx(0, abs=0.02)


def test_shuffle_passes_over_every_row_once_an_epoch_in_a_new_order():
    shuffle = Shuffle(10, seed=3)
    epochs = [[shuffle.at(10 * e + i) for i in range(10)] for e in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = Shuffle(10, seed=3)
    assert [again.at(i) for i in reversed(range(40))] == [row for epoch in reversed(epochs) for row in reversed(epoch)]
    assert [Shuffle(10, seed=4).at(i) for i in range(10)] != epochs[0]
