"""The analytic source of costs: a model on described hardware, by counting FLOPs and bytes.

Per layer, for a micro of `b` sequences, a slice of `l` tokens behind `s` (H hidden, F the MLP's, tensor degree t):

    GEMMs       2 * weights / t * b * (l + half_rate_rows) FLOPs at the reached peak, or the weights' bytes at the
                reached memory bandwidth if that takes longer; the same again for each of the two gradients
    attention   4 * b * H / t * l * (s + l / 2) FLOPs forward; 2.5 times that backward, all of it input gradient
    the rest    memory traffic of norms, activations, residuals, logits; a launch time a pass
    tensor > 1  two all-reduces of b * l * H values forward, two in the input gradient (Megatron)

The trap: K and V of the prefix are read again for every slice (the term in `s` alone), which no FLOP count shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from terapipe.models.config import EMBEDDING, HEAD, ModelConfig
from terapipe.planner.costs import BLOCK, DTYPE_BYTES, CostModel, LayerCosts, LinkModel, Overheads
from terapipe.planner.fit import Context
from terapipe.planner.hardware import Hardware
from terapipe.planner.pass_costs import CurveCost

INTRA, INTER = "intra", "inter"
BACKWARD_ATTENTION = 2.5  # FLOPs of attention's backward over its forward: five products for two


def analytic_costs(
    model: ModelConfig,
    hardware: Hardware,
    *,
    max_tokens: int,
    micro_sizes: Sequence[int] = (1,),
    tensor: int = 1,
    dtype: str | None = None,
) -> CostModel:
    """Costs for slices of up to `max_tokens` tokens. ValueError for a tensor degree that the heads do not divide by."""
    dtype = dtype or hardware.dtype
    for name, count in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn_hidden", model.ffn_hidden)):
        if count % tensor:
            raise ValueError(f"tensor degree {tensor} does not divide the model's {name} {count}; choose a divisor.")
    device = _Device.of(hardware, model, dtype, tensor)
    lengths = _grid(max_tokens, knees=[device.knee(size) for size in micro_sizes])
    layers = {kind: device.layer(kind, micro_sizes, lengths) for kind in (EMBEDDING, BLOCK, HEAD)}
    share = float(hardware.link_share)
    per_device = float(hardware.inter_bytes_per_s) * tensor / float(hardware.devices_per_node)
    links = {
        INTRA: LinkModel(float(hardware.intra_latency_s), float(hardware.intra_bytes_per_s) * share),
        # A stage of `tensor` devices sends a piece from each and so has their share of the node's network.
        INTER: LinkModel(float(hardware.inter_latency_s), per_device * share),
    }
    update_bytes = 2 * (DTYPE_BYTES[dtype] + 16.0)  # weight, gradient, master and moments, read and written
    norm_bytes, gradient_bytes = 4.0, 4.0
    return CostModel(
        source="analytic",
        hardware=hardware.name,
        model=model,
        dtype=dtype,
        max_tokens=max_tokens,
        tensor=tensor,
        devices_per_node=int(float(hardware.devices_per_node)),
        layers=layers,
        links=links,
        overheads=Overheads(
            norm_s=norm_bytes / device.memory_rate,
            update_s=update_bytes / device.memory_rate,
            first_backward_s=gradient_bytes / device.memory_rate,
        ),
    )


@dataclass(frozen=True)
class _Device:
    """Rates reached by one device, and the model it runs a part of."""

    hardware: Hardware
    model: ModelConfig
    bytes: int
    tensor: int
    gemm_rate: float
    attention_rate: float
    memory_rate: float

    @classmethod
    def of(cls, hardware: Hardware, model: ModelConfig, dtype: str, tensor: int) -> _Device:
        # A description has the peak of its own dtype; fp32 on a device described in 16 bits runs at a quarter.
        peak = float(hardware.peak_flops) / (4 if dtype == "fp32" and hardware.dtype != "fp32" else 1)
        return cls(
            hardware,
            model,
            DTYPE_BYTES[dtype],
            tensor,
            peak * float(hardware.gemm_share),
            peak * float(hardware.attention_share),
            float(hardware.memory_bytes_per_s) * float(hardware.memory_share),
        )

    def knee(self, micro_size: int) -> int:
        """The length up to which reading the weights takes longer than using them."""
        rows = self.bytes * self.gemm_rate / (2 * self.memory_rate) - float(self.hardware.half_rate_rows)
        return max(1, math.ceil(rows / micro_size))

    def layer(self, kind: str, micro_sizes: Iterable[int], lengths: Sequence[int]) -> LayerCosts:
        return LayerCosts(
            *layer_bytes(self.model, kind, self.bytes, self.tensor),
            forward={size: self._pass(kind, "forward", size, lengths) for size in micro_sizes},
            input_grad={size: self._pass(kind, "input_grad", size, lengths) for size in micro_sizes},
            weight_grad={size: self._pass(kind, "weight_grad", size, lengths) for size in micro_sizes},
        )

    def _pass(self, kind: str, name: str, micro: int, lengths: Sequence[int]) -> CurveCost:
        model, weight_pass = self.model, name == "weight_grad"
        weights = matmul_weights(model, kind) / self.tensor
        attention = per_start = 0.0
        traffic = _TRAFFIC[kind, name] * model.hidden * self.bytes
        if kind == BLOCK and not weight_pass:
            forward = 4 * micro * model.heads * model.head_dim / self.tensor
            attention = forward * (BACKWARD_ATTENTION if name == "input_grad" else 1.0) / self.attention_rate
            # Forward reads K and V of the prefix; backward also adds to fp32 accumulators of both.
            read = 2 * model.kv_heads * model.head_dim / self.tensor
            written = 2 * 4 * read if name == "input_grad" else 0
            per_start = micro * (read * self.bytes + written) / self.memory_rate
        if kind == HEAD and not weight_pass:  # logits written and read, in fp32 in the loss
            traffic += 2 * model.vocab / self.tensor * 4
        weight_bytes = weights * (self.bytes + (8.0 if weight_pass else 0.0))  # the gradient's sum is read and written
        half = float(self.hardware.half_rate_rows)
        reduced = 2 if self.tensor > 1 and kind == BLOCK and not weight_pass else 0

        def seconds(length: int) -> float:
            rows = micro * length
            gemm = max(2 * weights * (rows + half) / self.gemm_rate, weight_bytes / self.memory_rate) if weights else 0
            value = gemm + rows * traffic / self.memory_rate + attention * length * length / 2
            if reduced:
                size = rows * model.hidden * self.bytes * 2 * (self.tensor - 1) / self.tensor
                rate = float(self.hardware.intra_bytes_per_s) * float(self.hardware.link_share)
                value += reduced * (float(self.hardware.intra_latency_s) + size / rate)
            busy = weights or not weight_pass
            return value + (float(self.hardware.launch_s) if busy else 0.0)

        return CurveCost(
            tuple(lengths), tuple(seconds(length) for length in lengths), Context(0.0, per_start, attention)
        )


# Values of `hidden` width read and written beside GEMMs and attention, for each token: norms, residuals, activation.
_TRAFFIC = {
    (EMBEDDING, "forward"): 3.0,
    (EMBEDDING, "input_grad"): 0.0,
    (EMBEDDING, "weight_grad"): 3.0,
    (BLOCK, "forward"): 24.0,
    (BLOCK, "input_grad"): 36.0,
    (BLOCK, "weight_grad"): 4.0,
    (HEAD, "forward"): 3.0,
    (HEAD, "input_grad"): 5.0,
    (HEAD, "weight_grad"): 2.0,
}


def matmul_weights(model: ModelConfig, kind: str) -> int:
    """Parameters of a layer that multiply every token; the embedding only looks up."""
    if kind == EMBEDDING:
        return 0
    shapes = model.parameter_shapes("blocks.0" if kind == BLOCK else kind)
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)


def model_flops(model: ModelConfig, *, tokens: int, sequences: int) -> float:
    """FLOPs of a step without recomputation: 6 a weight and token, and causal attention's half square three times."""
    weights = model.layers * matmul_weights(model, BLOCK) + matmul_weights(model, HEAD)
    attention = model.layers * 4 * model.heads * model.head_dim * tokens / 2
    return 3.0 * sequences * tokens * (2 * weights + attention)


class LayerBytes(NamedTuple):
    """What `LayerCosts` says of memory, in its order."""

    parameters: int
    saved_bytes_per_token: float
    cache_bytes_per_token: float
    accumulator_bytes_per_token: float


def layer_bytes(model: ModelConfig, kind: str, bytes: int, tensor: int = 1) -> LayerBytes:
    """Memory of a layer whose values have `bytes` bytes, on each of `tensor` devices."""
    shapes = model.parameter_shapes("blocks.0" if kind == BLOCK else kind)
    parameters = math.ceil(sum(math.prod(shape) for shape in shapes.values()) / tensor)
    cached = 2 * model.kv_heads * model.head_dim / tensor if kind == BLOCK else 0.0
    return LayerBytes(parameters, saved_bytes_per_token(model, kind, bytes, tensor), cached * bytes, cached * 4)


def saved_bytes_per_token(model: ModelConfig, kind: str, bytes: int, tensor: int = 1) -> float:
    """What a token's forward keeps for its backward in this engine.

    Each norm keeps its input, its result and its statistics (RMSNorm a third tensor); attention the query and its
    output (K and V lie in the cache), the lse, the rotary angles; the MLP what enters and leaves the activation and
    the product; the loss fp32 probabilities.
    """
    learned, rms = model.position == "learned", model.norm == "rmsnorm"
    norm = model.hidden * bytes * (3 if rms else 2) + (4.0 if rms else 8.0)
    if kind == EMBEDDING:
        return 16.0 if learned else 8.0  # ids of token and position
    if kind == HEAD:
        return norm + 4.0 * model.vocab / tensor + 8.0
    mlp = (4 if model.mlp == "swiglu" else 2) * model.ffn_hidden
    cut = bytes * (2 * model.heads * model.head_dim + mlp) + 4.0 * model.heads
    return 2 * norm + cut / tensor + (0.0 if learned else 4.0 * model.head_dim)


def _grid(max_tokens: int, knees: Iterable[int]) -> list[int]:
    """Lengths at which curves are tabulated: 1, 2, 4, 6, 8, 12, ... and where they bend."""
    powers = [2**power for power in range(max_tokens.bit_length())]
    points = {*powers, *(power * 3 // 2 for power in powers if power > 1), max_tokens, *knees}
    return sorted(point for point in points if point <= max_tokens)
