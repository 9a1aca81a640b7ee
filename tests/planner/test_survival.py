"""The parts of the runtime that outlives its processes, each for itself: the fence, stalls, checkpoints, batches."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from meshwright.cli import run
from meshwright.passes.holdings import Kind, as_dtensor
from meshwright.planner import _torch
from meshwright.planner.apply import device_mesh_for
from meshwright.planner.training.checkpoints import Checkpoints, newest
from meshwright.planner.training.epochs import Beat, Event, event_at, post
from meshwright.planner.training.fence import Fence
from meshwright.planner.training.stalls import Stalls
from meshwright.planner.training.supervisor import Limits
from meshwright.planner.training.survivors import fitting_mesh
from meshwright.planner.training.watch import Watch
from meshwright.plans import Mesh, RequestError
from meshwright.plans.batches import Batches


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(listener.getsockname())
    return near, listener.accept()[0]


def test_the_fence_shuts_what_was_opened_within_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        outside = pair(listener)
        fence = Fence()
        with fence.around(), socket.create_server(("127.0.0.1", 0)) as inner:
            inside = pair(listener)
            heard: list[bytes] = []
            waiting = threading.Thread(target=lambda: heard.append(inside[0].recv(1)))
            waiting.start()
            assert waiting.is_alive()
            # Also while groups are still being made; a listener is left alone: gloo ends the process over it.
            assert fence.shut() == 2
            waiting.join(1.0)
            assert heard == [b""]
            last = pair(inner)
        outside[0].send(b"x")
        assert outside[1].recv(1) == b"x"
        late = pair(listener)
        fence.shut()
        late[0].send(b"y")
        assert late[1].recv(1) == b"y"
        for end in (*outside, *inside, *late, *last):
            end.close()


def test_who_is_silent_and_who_is_behind() -> None:
    stalls = Stalls(2.0, 10.0)
    for second in range(9):
        for who in range(4):
            # Process 3 is slow, and shows signs of life (case 142).
            stalls.heard(who, Beat(count=second, done=second if who < 3 else second // 3, stage="step"), float(second))
        assert list(stalls.to_end(range(4), float(second))) == []
    for second in range(9, 13):
        for who in (0, 1, 3):
            stalls.heard(who, Beat(count=second, done=second, stage="step"), float(second))
    assert list(stalls.to_end(range(4), 12.0)) == [(2, "gave no sign of life for 2 s")]
    stalls.forget(2)
    for second in range(13, 30):
        for who, issued in ((0, 15), (1, 14), (3, 15)):
            last = "all_gather 15 of group tp" if issued == 15 else ""
            beat = Beat(count=second, done=13, stage="step", issued={"tp": issued}, last=last)
            stalls.heard(who, beat, float(second))
    ((who, reason),) = stalls.to_end((0, 1, 3), 29.0)
    assert who == 1 and reason == "did not enter all_gather 15 of group tp, for which processes 0, 3 waited 10 s"


def test_when_nobody_is_behind_nobody_is_ended() -> None:
    stalls = Stalls(50.0, 10.0)
    for second in range(0, 40, 2):
        for who in range(3):
            stalls.heard(who, Beat(count=second, done=1, stage="step", issued={"tp": 5}), float(second))
    assert list(stalls.to_end(range(3), 40.0)) == []


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path / "nothing") is None
    for name, complete in (("step-9.1-aa", True), ("step-10.1-aa", True), ("step-11.2-aa", False), ("other", True)):
        (tmp_path / name).mkdir()
        if complete:
            (tmp_path / name / ".metadata").write_bytes(b"")
    assert newest(tmp_path) == tmp_path / "step-10.1-aa"


def test_older_checkpoints_go_when_newer_ones_are_complete(tmp_path: Path) -> None:
    for step, complete in ((1, False), (2, True), (3, True), (4, True), (5, False)):
        (tmp_path / f"step-{step}.1-aa").mkdir()
        if complete:
            (tmp_path / f"step-{step}.1-aa" / ".metadata").write_bytes(b"")
    Checkpoints(tmp_path, every=1, keep=2)._prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3.1-aa", "step-4.1-aa", "step-5.1-aa"]


@pytest.mark.parametrize(("samples", "size"), [(12, 4), (13, 4), (3, 5), (1, 1)])
def test_each_sample_is_used_once_per_epoch(samples: int, size: int) -> None:
    batches = Batches(samples=samples, size=size, epochs=3, seed=1)
    per_epoch = -(-samples // size)
    assert len(batches) == 3 * per_epoch
    for epoch in range(3):
        used = [i for at in range(per_epoch) for i in batches[epoch * per_epoch + at]]
        assert Counter(used) == Counter(range(samples)) and tuple(used) == batches.samples_of(epoch)
    assert samples < 12 or batches.samples_of(0) != batches.samples_of(1)
    assert Batches(samples=samples, size=size, seed=None).samples_of(0) == tuple(range(samples))


@pytest.mark.parametrize(
    ("first", "ranks", "shape"),
    [
        ("2x2", 4, (2, 2)),
        ("2x2", 3, (3, 1)),
        ("2x4", 6, (3, 2)),
        ("2x4", 7, (7, 1)),
        ("8", 5, (5,)),
        ("2x2x2", 6, (3, 1, 2)),
        ("2x2", 1, (1, 1)),
    ],
)
def test_survivors_keep_the_last_axes(first: str, ranks: int, shape: tuple[int, ...]) -> None:
    assert fitting_mesh(Mesh.parse(first), ranks).shape == shape


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'hang_s' must be positive and less than 'stall_s', got 5 and 5"):
        Limits(hang_s=5.0, stall_s=5.0)
    with pytest.raises(RequestError, match="'every' and 'keep' must be at least 1"):
        Checkpoints(tmp_path, every=0, keep=1)
    with pytest.raises(RequestError, match="under a supervisor"):
        Watch({})
    with pytest.raises(RequestError, match="'timeout_s' must be more than"):
        mw.elastic(torch.nn.Linear(2, 2), optimizer=lambda m: torch.optim.SGD(m.parameters()), timeout_s=5.0)
    with pytest.raises(RequestError, match="'samples' and 'size'"):
        Batches(samples=0, size=1)


def test_events_are_read_in_order_and_not_before_they_are_there() -> None:
    store = dist.HashStore()
    store.add("events", 1)  # by one that ended before it said more
    post(store, Event(kind="ready", who=3))
    assert event_at(store, 1) is None and event_at(store, 2) == Event(kind="ready", who=3)


def test_a_group_that_could_not_be_made_leaves_no_trace_in_names() -> None:
    broken = dist.PrefixStore("lost", dist.HashStore())
    names = []
    for reset in (False, True):
        # Nobody else comes: its rank 1 is lost.
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", store=broken, rank=0, world_size=2, timeout=timedelta(milliseconds=50))
        assert not dist.is_initialized()
        if reset:
            _torch.count_groups_anew()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        names.append(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        dist.destroy_process_group()
    # The trap: processes that failed to make a group call the next one by another name than those that did not.
    assert names == ["1", "0"]


@pytest.fixture
def four_fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_fake_ranks")
def test_what_torch_does_not_tell() -> None:
    wide = init_device_mesh("cpu", (4,))
    from torch.distributed.device_mesh import DeviceMesh

    narrow = DeviceMesh("cpu", [0, 1, 2])
    tensor = distribute_tensor(torch.zeros(7, 2), wide, [Shard(0)])
    # The trap: the same placements on another mesh leave the tensor where it is.
    assert tensor.redistribute(narrow, [Shard(0)]).device_mesh == wide
    # The trap: a local piece does not tell the size of a dim that does not divide.
    assert DTensor.from_local(torch.zeros(3, 2), narrow, [Shard(0)]).shape[0] == 9
    made = as_dtensor(torch.zeros(3, 2), Kind(name="w", shape=(7, 2), dtype="float32", like="w"), ("S(0)",), narrow)
    assert made.shape == (7, 2) and made.device_mesh == narrow


@pytest.mark.parametrize("marks", [("", ""), ("@1", "@2")])
def test_a_mesh_in_the_place_of_an_equal_one_needs_names_of_its_own(marks: tuple[str, str]) -> None:
    found = []
    for rank, mark in zip((1, 0), marks, strict=True):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = device_mesh_for(Mesh.of((2,)), mark=mark)
            tensor = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)], run_check=False)
            found.append((tensor.detach().device_mesh is mesh, tensor.detach().device_mesh.get_coordinate()))
        finally:
            dist.destroy_process_group()
    # The trap: the second tensor, on rank 0, is said to lie where rank 1 was.
    assert found[1] == ((False, (1,)) if marks[0] == marks[1] else (True, (0,)))


def test_watching_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(RequestError, match="must run on Linux"):
        Fence()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--nproc", "2", "nothing.py"], "'SCRIPT' must be a Python file, got nothing.py"),
        (["run", "--nproc", "0", "x.py"], "Invalid value for '--nproc'"),
        (["run", "--nproc", "2", "--listen", "here", __file__], "'--listen' must be host:port, got 'here'"),
        (["run", "--nproc", "2", "--join", "a:1", "--nodes", "2", __file__], "'--join' must not be given with --nodes"),
        (["run", "--nproc", "2", "--hang-after", "9", "--stall-after", "9", __file__], "'hang_s' must be positive and"),
        (["members", "nowhere", "--add", "1"], "'ADDRESS' must be host:port, got 'nowhere'"),
        (["members", "127.0.0.1:1"], "'members' must be given --drain, --add or --speed"),
    ],
)
def test_wrong_requests_on_the_command_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert said in capsys.readouterr().err
