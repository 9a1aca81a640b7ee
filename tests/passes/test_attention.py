"""Attention for other devices equals the CPU op that it takes the place of."""

import pytest
import torch

from meshwright.passes.attention import attention, attention_backward, attention_elsewhere
from meshwright.passes.capture import capture
from meshwright.passes.naming import op_name


class Attention(torch.nn.Module):
    def __init__(self, causal: bool, masked: bool) -> None:
        super().__init__()
        self.causal, self.masked = causal, masked

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if self.masked else None
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal).square().sum()


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_custom_attention_equals_the_captured_op(causal: bool, masked: bool) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    nodes = [n for n in capture(Attention(causal, masked), tuple(given)).ops() if "scaled_dot_product" in op_name(n)]
    assert len(nodes) == 2
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if masked else None
    out, lse = attention(*[t.detach() for t in given], mask, causal, None)
    want = torch.nn.functional.scaled_dot_product_attention(*given, mask, is_causal=causal)
    torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
    assert lse.shape == (2, 4, 6)
    grad = torch.randn_like(want)
    have = attention_backward(grad, *[t.detach() for t in given], mask, causal, None)
    for a, b in zip(have, torch.autograd.grad(want, given, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for node in nodes:
        replaced = attention_elsewhere(node, node.args, dict(node.kwargs))
        assert replaced is not None
        assert replaced[1][-2] is causal


def test_dropout_inside_attention_is_refused_elsewhere() -> None:
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    node = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.5))
    with pytest.raises(NotImplementedError, match="dropout"):
        attention_elsewhere(node, node.args, {})
