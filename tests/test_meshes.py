"""Meshes of odd counts, of axes of one device and of up to four axes: random plans equal one process."""

from __future__ import annotations

from typing import Any

import pytest

from .test_cases import case_of, outcome

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = [
    ("003_mlp_hidden5", "3"),
    ("008_heads3", "2x1x3"),
    ("003_mlp_hidden5", "12"),
    ("051_scatter_add_tokens", "2x2x2"),
    ("045_two_vocabs_same_ids", "2x2x1x2"),
    ("124_zero_size_tensors", "6"),
]
SLOW = [
    ("010_gqa_native_flag", "12"),
    ("008_heads3", "2x2x1x2"),
    ("021_fused_gate_up", "2x2x2"),
    ("021_fused_gate_up", "3x2x2"),
    ("030_batchnorm_train", "6"),
    ("066_groupnorm_channels", "3"),
    ("077_moe_capacity_drop", "2x1x3"),
    ("107_ce_soft_targets_kl", "12"),
    ("107_ce_soft_targets_kl", "2x2x1x2"),
    ("113_nn_transformer_layer", "6"),
    ("113_nn_transformer_layer", "2x1x3"),
    ("003_mlp_hidden5", "1x3x1x2"),
    ("126_mesh_one_device", "1x1x1x1"),
]


def runs() -> list[Any]:
    slow = [pytest.param(name, mesh, 3, marks=pytest.mark.slow) for name, mesh in SLOW]
    return [*(pytest.param(name, mesh, 1) for name, mesh in QUICK), *slow]


@pytest.mark.parametrize(("name", "mesh", "count"), runs())
def test_random_plans_on_odd_meshes_are_equal(name: str, mesh: str, count: int) -> None:
    case = case_of(name)
    found = outcome(case, *case.build(), mesh=mesh, random=count, seed=int(name[:3]))
    assert found == "equal", found
