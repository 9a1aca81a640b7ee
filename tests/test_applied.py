"""An applied model is used as the plain one is: hooks, buffers, modes, attributes. One process on a mesh of one rank;
the same on pieces is what `check` simulates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import meshwright as mw

# PyTorch's word on a hook for the backward of a call without inputs that need gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

X = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def applied(model: nn.Module, args: tuple = (X,), **kwargs: Any) -> Any:
    return mw.apply(mw.plan(model, args, cluster="cpu:1", mesh="1", **kwargs), model, args, **kwargs)


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    """The plain model, and it applied."""
    torch.manual_seed(0)
    model = make().double()
    plain = make().double()
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    return plain, applied(model)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_after_backward(plain: nn.Module, parallel: nn.Module) -> None:
    for model in (plain, parallel):
        model.zero_grad()
        model(X).pow(2).sum().backward()
    for (name, want), got in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, msg=name)
    for (name, want), got in zip(plain.named_buffers(), parallel.buffers(), strict=True):
        torch.testing.assert_close(whole(got), want, msg=name)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))


def called_with_hooks() -> nn.Module:
    model = net()
    model.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    model.register_forward_hook(lambda _, given, out: out.mul(2))
    model.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 3,))
    return model


def trained_with_hooks() -> nn.Module:
    model = net()
    first, last = (dict(model.named_parameters())[name] for name in ("0.weight", "2.weight"))
    first.register_hook(lambda gradient: gradient * 5)
    last.register_post_accumulate_grad_hook(lambda parameter: (parameter.grad.mul_(3), None)[1])  # type: ignore[union-attr]
    return model


class Follows(nn.Module):
    """Changes a buffer and then uses it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        return h * self.mean


class Returns(nn.Module):
    """Returns its weight beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x).sum(), self.a.weight


@pytest.mark.parametrize("make", [called_with_hooks, trained_with_hooks, Follows])
def test_hooks_run_once_and_buffers_change_as_in_the_plain_model(make: Callable[[], nn.Module]) -> None:
    same_after_backward(*both(make))


def test_hooks_that_come_after_apply_run_around_the_planned_call() -> None:
    plain, parallel = both(called_with_hooks)
    for model in (plain, parallel):
        model.register_forward_hook(lambda _, given, out: out + 7)
    same_after_backward(plain, parallel)


def test_hooks_run_once_where_the_first_call_plans() -> None:
    plain = called_with_hooks().double()
    model = mw.autoparallelize(copy.deepcopy(plain), mesh="1")
    want = plain(X)
    for _ in range(2):
        torch.testing.assert_close(whole(model(X)), want)


@pytest.mark.parametrize("make", [called_with_hooks, trained_with_hooks, Follows, Returns])
def test_check_sees_hooks_buffers_and_returned_weights(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert mw.check(make(), (X.float(),), mesh="2", accumulate=2).equal


def test_check_finds_a_hook_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.planner.checking.check.has_hooks", lambda tensor: False)
    assert not mw.check(trained_with_hooks(), (X.float(),), mesh="2").equal


def test_a_pipeline_refuses_hooks_on_parameters_by_name() -> None:
    with pytest.raises(mw.RequestError, match="one on 0.weight"):
        mw.check(trained_with_hooks(), (X.float(),), mesh="1", pipeline=2, microbatches=2)


class Scaled(nn.Module):
    """Reads a number, counts its calls, and is told of epochs that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.norm = nn.Linear(5, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.scale, self.calls, self.epoch = 2.0, 0, 0

    def forward(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.drop(self.a(x) * self.scale)).pow(power).sum()


def scaled() -> Any:
    return applied(Scaled().double())


def test_what_a_program_does_not_read_may_change() -> None:
    model = scaled()
    model.epoch, model.calls = 7, 30
    assert model(X).isfinite()


def frozen() -> Any:
    model = net().double()
    model[0].requires_grad_(False)
    return applied(model)


class Keeps(nn.Module):
    """Adds what it computed the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.previous = nn.Linear(5, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) if self.previous is None else self.a(x) + self.previous
        self.previous = h.detach()
        return h


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "number": (scaled, lambda m: setattr(m, "scale", 5.0), "'scale' must stay 2.0, .* got 5.0; set it back"),
    "dropout": (scaled, lambda m: setattr(m.drop, "p", 0.0), "'drop.p' must stay 0.5, .* got 0.0"),
    "mode": (scaled, lambda m: m.eval(), r"the model in eval mode \(planned in train mode; to validate"),
    "part": (scaled, lambda m: m.norm.eval(), "module norm in eval mode"),
    "unfrozen": (frozen, lambda m: m.requires_grad_(True), "'0.weight' must stay frozen"),
    "dtype": (scaled, lambda m: m.float(), "'a.weight' must stay torch.float64, .* got torch.float32"),
}


@pytest.mark.parametrize(("make", "change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_the_program_cannot_follow_is_named(
    make: Callable[[], Any], change: Callable[[Any], Any], message: str
) -> None:
    model = make()
    model(X)
    change(model)
    with pytest.raises(mw.ReplayError, match=message):
        model(X)


def test_a_call_that_the_plan_is_not_for_says_what_is_other() -> None:
    model = scaled()
    with pytest.raises(mw.ReplayError, match="args.0 of torch.float32 .planned with torch.float64"):
        model(X.float())
    with pytest.raises(mw.ReplayError, match="args.0 with requires_grad=True"):
        model(X.clone().requires_grad_())
    assert model(X).isfinite()
    narrow = applied(net(), (X.float(),))
    with pytest.raises(mw.ReplayError, match="autocast of cpu to torch.bfloat16"), torch.autocast("cpu"):
        narrow(X.float())


def test_an_applied_model_is_not_planned_again() -> None:
    model = applied(net().double())
    with pytest.raises(mw.CaptureError, match="runs by a plan already"):
        mw.plan(model, (X,), cluster="cpu:1", mesh="1")


def test_another_loss_is_told_by_the_first_op() -> None:
    model = net().double()
    plan = mw.plan(model, (X,), cluster="cpu:1", mesh="1", loss=torch.sum)
    with pytest.raises(mw.ReplayError, match="without .*; give apply the loss, mode"):
        mw.apply(plan, model, (X,), loss=lambda out: out.exp().mean())


def test_whole_weights_are_loaded_by_the_call_that_is_named() -> None:
    plain, parallel = both(net)
    state = {name: value * 2 for name, value in plain.state_dict().items()}
    with pytest.raises(mw.RequestError, match="got 0.weight whole; call .*set_model_state_dict"):
        parallel.load_state_dict(state)
    set_model_state_dict(parallel, dict(state), options=StateDictOptions(full_state_dict=True))
    plain.load_state_dict(state)
    same_after_backward(plain, parallel)
    parallel.load_state_dict(parallel.state_dict())


def test_a_tensor_kept_between_calls_is_named() -> None:
    with pytest.raises(mw.CaptureError, match="got previous, which a call reads and then sets"):
        mw.plan(Keeps(), (X.float(),), cluster="cpu:1", mesh="1")


def test_modules_are_as_they_were_after_a_capture() -> None:
    mw.plan(net(), (X.float(),), cluster="cpu:1", mesh="1")
    assert "__getattribute__" not in vars(nn.Module)
    assert nn.Module.__setattr__.__module__ == nn.Module.__module__


class Switches(nn.Module):
    """Asks for autocast on a GPU, as `torch.autocast` does where there is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_enabled("cuda", before)
        return x.sum()


def test_autocast_that_a_capture_does_not_see_is_refused() -> None:
    with pytest.raises(mw.CaptureError, match="under torch.autocast on cuda"):
        mw.plan(Switches(), (X,), cluster="cpu:1", mesh="1")
    assert torch.set_autocast_enabled.__name__ == "set_autocast_enabled"
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(mw.CaptureError, match="under torch.autocast on cuda"):
            mw.plan(net(), (X.float(),), cluster="cpu:1", mesh="1")
    finally:
        torch.set_autocast_enabled("cuda", False)


class Mixed(nn.Module):
    """Has a part that is not cast, within a call that is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.b(h.float())


def test_autocast_around_plan_and_calls_casts_as_in_the_plain_model() -> None:
    torch.manual_seed(0)
    plain, x = Mixed(), X.float()
    with torch.autocast("cpu", torch.bfloat16):
        model = applied(plain, (x,))
        want, got = plain(x), model(x)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.02, atol=1e-2)
    want.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        got.sum().backward()
    for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad), wanted.grad, rtol=0.02, atol=1e-2)
