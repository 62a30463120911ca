"""One description of the paper's V100 cluster: seconds of a slice on a stage, and of a step, for any model on it.

Per layer and GPU, for a slice of `l` tokens behind `c`, hidden `H`, `h` heads, tensor degree `T`, fp16:

    GEMMs      forward   max(24 l H^2 / T / gemm, W / memory)           W = 24 H^2 / T bytes of weights
               backward  twice that, and 3 W / memory for adding to the weights' gradient
    attention  forward   4 l (l + c) H / T / gemm + score_bytes * l (l + c) h / T / memory
               backward  2 and 1.5 times as much (the authors' code computes the whole rectangle of scores, in memory)
    launches   launch_s forward, twice that backward: added, not a lower bound
    tensor     two all-reduces a pass of 2 l H bytes each over NVLink
    stage hop  2 l H bytes over the network or NVLink, not overlapped, then a broadcast within the tensor group

and once a step the optimizer and, with replicas, an all-reduce of fp16 gradients over each node's network card.

Four numbers are fitted (`paper_fit`) and then frozen here (`FITTED`); the rest are the hardware's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terapipe.planner.paper_settings import GPUS_PER_NODE, Setting

NETWORK_BYTES_PER_S = 3.125e9  # 25 Gbit/s, one card a node
NVLINK_BYTES_PER_S = 150e9  # six links of 25 GB/s in each direction
OPTIMIZER_BYTES = 30  # moved per parameter: fp32 master and two moments read and written, fp16 gradient and weight

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClusterRates:
    """What is fitted: FLOP/s that a large GEMM reaches, bytes/s that memory reaches, seconds of a layer's launches in
    one forward, bytes moved per attention score in one forward."""

    gemm_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    score_bytes: float


FITTED = ClusterRates(93.7e12, 848e9, 0.865e-3, 41.2)


@dataclass(frozen=True)
class StageTimes:
    """Forward and backward seconds of slices on one stage, transfers included, as the authors' planner counts them."""

    forward: Times
    backward: Times


def layer_times(setting: Setting, lengths: npt.ArrayLike, starts: npt.ArrayLike, rates: ClusterRates) -> StageTimes:
    """One layer on one GPU, without communication. lengths, starts: tokens, of one shape or broadcast."""
    length, start = np.asarray(lengths, dtype=np.float64), np.asarray(starts, dtype=np.float64)
    hidden, heads, tensor = setting.model.hidden, setting.model.heads, setting.tensor
    weights_s = 24 * hidden**2 / tensor / rates.memory_bytes_per_s
    gemms_s = np.maximum(24 * length * hidden**2 / tensor / rates.gemm_flops_per_s, weights_s)
    pairs = length * (length + start)
    products_s = 4 * pairs * hidden / tensor / rates.gemm_flops_per_s
    scores_s = rates.score_bytes * pairs * heads / tensor / rates.memory_bytes_per_s
    return StageTimes(
        gemms_s + products_s + scores_s + rates.launch_s,
        2 * gemms_s + 3 * weights_s + 2 * products_s + 1.5 * scores_s + 2 * rates.launch_s,
    )


def stage_times(
    setting: Setting, lengths: npt.ArrayLike, starts: npt.ArrayLike, rates: ClusterRates = FITTED, *, network: bool
) -> StageTimes:
    """One stage; `network`: its hop leaves the node."""
    layer = layer_times(setting, lengths, starts, rates)
    hidden_bytes = 2.0 * setting.model.hidden * np.asarray(lengths, dtype=np.float64)
    group = setting.tensor
    reduce_s = 2 * hidden_bytes * 2 * (group - 1) / group / NVLINK_BYTES_PER_S
    hop_s = hidden_bytes / (NETWORK_BYTES_PER_S if network else NVLINK_BYTES_PER_S)
    hop_s = hop_s + (hidden_bytes / NVLINK_BYTES_PER_S if group > 1 else 0.0)
    layers = setting.layers_per_stage
    return StageTimes(layers * (layer.forward + reduce_s) + hop_s, layers * (layer.backward + reduce_s) + hop_s)


def leaves_node(setting: Setting, stage: int) -> bool:
    """Whether the hop after `stage` crosses the network. Ranks are laid out tensor first, then stage by stage."""
    per_node = GPUS_PER_NODE // setting.tensor
    return stage < setting.pipe - 1 and (stage + 1) % per_node == 0


def once_per_step_s(setting: Setting, rates: ClusterRates = FITTED) -> float:
    """Optimizer, and the gradients' all-reduce over replicas."""
    parameters = 12 * setting.model.hidden**2 * setting.layers_per_stage / setting.tensor
    reduced = 2 * (setting.data - 1) / setting.data * 2 * parameters * GPUS_PER_NODE / NETWORK_BYTES_PER_S
    return parameters * OPTIMIZER_BYTES / rates.memory_bytes_per_s + reduced


def step_s(setting: Setting, slices: Sequence[int], rates: ClusterRates = FITTED) -> float:
    """A step in closed form: every micro passes the slowest stage, and its largest slice fills all the others.

    Exact where stages are equal, forward and backward each a flow shop; else a little above `simulate`'s."""
    starts = np.cumsum([0, *slices[:-1]])
    slow, quick = (stage_times(setting, slices, starts, rates, network=network) for network in (True, False))
    num_slow = sum(leaves_node(setting, stage) for stage in range(setting.pipe))
    total = once_per_step_s(setting, rates)
    for slow_s, quick_s in ((slow.forward, quick.forward), (slow.backward, quick.backward)):
        bottleneck = slow_s if num_slow else quick_s
        fill = max(num_slow - 1, 0) * slow_s.max() + (setting.pipe - max(num_slow, 1)) * quick_s.max()
        total += setting.micros * float(bottleneck.sum()) + float(fill)
    return total
