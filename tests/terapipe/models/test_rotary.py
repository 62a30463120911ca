"""Rotary positions: against the textbook 2x2 rotation, and the memory of the last positions."""

from __future__ import annotations

import math

import torch

from terapipe.models.rotary import RotaryAngles
from tpkernels.fused import rotary


def test_pairs_turn_by_position_times_frequency() -> None:
    head_dim, theta = 6, 100.0
    positions = torch.tensor([[0, 1, 7, 1_000_003]])
    x = torch.randn(1, 4, 3, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotary(x, RotaryAngles(head_dim, theta)(positions, dtype=x.dtype))
    for token, position in enumerate(positions[0].tolist()):
        for pair in range(head_dim // 2):
            angle = position * theta ** (-2 * pair / head_dim)
            a, b = x[0, token, :, 2 * pair], x[0, token, :, 2 * pair + 1]
            expected = torch.stack(
                (a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle))
            )
            torch.testing.assert_close(turned[0, token, :, 2 * pair : 2 * pair + 2].T, expected, rtol=0, atol=1e-9)


def test_scores_depend_on_the_distance_alone_even_far_out() -> None:
    angles = RotaryAngles(8, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1))

    def score(query_position: int, key_position: int) -> float:
        at = (torch.tensor([[place]]) for place in (query_position, key_position))
        turned = [rotary(x, angles(place, dtype=x.dtype)) for x, place in zip((q, k), at, strict=True)]
        return float((turned[0] * turned[1]).sum())

    assert abs(score(5, 2) - score(2_000_005, 2_000_002)) < 1e-5


def test_bf16_is_turned_in_fp32_and_comes_back_as_bf16() -> None:
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    angles = RotaryAngles(8, 10000.0)(torch.arange(5)[None], dtype=x.dtype)
    assert angles.dtype == torch.complex64
    assert torch.equal(rotary(x, angles), rotary(x.float(), angles).bfloat16())


def test_the_remembered_angles_notice_other_positions_other_dtypes_and_writes_in_place() -> None:
    angles = RotaryAngles(4, 10000.0)
    positions = torch.arange(3)[None].clone()
    first = angles(positions, dtype=torch.float32)
    assert angles(positions, dtype=torch.float32) is first
    assert angles(positions, dtype=torch.float64).dtype == torch.complex128
    positions += 10
    assert torch.equal(
        angles(positions, dtype=torch.float32),
        RotaryAngles(4, 10000.0)(torch.arange(10, 13)[None], dtype=torch.float32),
    )
    with torch.inference_mode():
        assert angles(torch.arange(3)[None], dtype=torch.float32).shape == (1, 3, 1, 2)
