"""Uneven stages: contiguous runs of layers whose slowest is as fast as possible, embedding, head and loss counted.

Layers between embedding and head are alike, so a stage is told by how many blocks it has and whether it has an end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def split_by_time(times: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Ranges [first, last) of layers, at least one a stage, with the smallest possible largest sum of `times`; among
    these the later stages are not left with more than they need.

    ValueError when there are fewer layers than stages.
    """
    layers = len(times)
    if stages > layers:
        raise ValueError(f"{stages} stages need at least {stages} layers, the model has {layers}; use fewer stages.")
    before = [0.0]
    for time in times:
        before.append(before[-1] + time)
    # best[k][i]: the smallest largest sum of the first i layers in k stages; cut[k][i]: where its last stage begins.
    best = [before[:]]
    best[0][0] = float("inf")
    cuts: list[list[int]] = [[0] * (layers + 1)]
    for count in range(2, stages + 1):
        row, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        low = count - 1
        for last in range(count, layers + 1):
            # The optimum's cut never moves back as `last` grows: before it the left part is the cheaper one.
            low = max(low, count - 1)
            while low + 1 < last and max(best[-1][low + 1], before[last] - before[low + 1]) <= max(
                best[-1][low], before[last] - before[low]
            ):
                low += 1
            row[last], cut[last] = max(best[-1][low], before[last] - before[low]), low
        best.append(row)
        cuts.append(cut)
    ends = [layers]
    for count in range(stages - 1, 0, -1):
        ends.append(cuts[count][ends[-1]])
    ends.append(0)
    ends.reverse()
    return tuple(itertools.pairwise(ends))
