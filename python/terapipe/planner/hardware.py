"""Hardware descriptions as data: what the analytic cost model knows of a device and its links, each value with its
source.

Rates are those of the data sheets; `gemm_share`, `attention_share`, `memory_share` and `link_share` are what of them
is reached, and are estimates unless their source says measured. Time of a GEMM over `rows` tokens is that of
`rows + half_rate_rows` rows at the reached peak: at `half_rate_rows` rows half the peak is reached (its saturation
length). The trap: "inter" bandwidth is a node's whole network, which its devices share.
"""

from __future__ import annotations

from dataclasses import dataclass

from terapipe.names import unknown


@dataclass(frozen=True)
class Value:
    """A number and where it comes from."""

    value: float
    source: str

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Hardware:
    """One kind of device in one kind of node. Rates in FLOP/s and bytes/s, latencies in seconds."""

    name: str
    peak_flops: Value  # dense, of the training dtype, with fp32 accumulation
    memory_bytes_per_s: Value
    memory_bytes: Value
    devices_per_node: Value
    gemm_share: Value
    attention_share: Value
    memory_share: Value
    half_rate_rows: Value
    launch_s: Value  # host and launch time of one layer's pass over one slice, however short
    intra_latency_s: Value
    intra_bytes_per_s: Value  # one direction between two devices of a node
    inter_latency_s: Value
    inter_bytes_per_s: Value  # one direction of a node's network
    link_share: Value
    dtype: str = "bf16"

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.dtype})"]
        for name, value in vars(self).items():
            if isinstance(value, Value):
                lines.append(f"  {name:<20} {value.value:<10.4g} {value.source}")
        return "\n".join(lines)


_GUESS = "estimate, not measured here"
_SHARE = Value(0.75, f"{_GUESS}: of line rate")
_LAUNCH = Value(1.2e-4, f"{_GUESS}: about 20 kernels of 6 us a pass")
_MEMORY_SHARE = Value(0.8, f"{_GUESS}: of a large copy")
_NVLINK_LATENCY = Value(1.0e-5, "NCCL send/recv of small messages on NVLink takes 7 to 17 us (public reports)")
_NETWORK_LATENCY = Value(3.0e-5, "NCCL send/recv over InfiniBand takes 27 to 31 us (public reports)")

V100 = Hardware(
    name="v100-p3.16xlarge",
    dtype="fp16",
    peak_flops=Value(125e12, "V100 SXM2 mixed precision, AWS launch post of P3"),
    memory_bytes_per_s=Value(900e9, "V100 data sheet, HBM2"),
    memory_bytes=Value(16e9, "p3.16xlarge: 128 GiB over 8 devices, AWS launch post of P3"),
    devices_per_node=Value(8, "p3.16xlarge"),
    gemm_share=Value(0.5, "estimate from 69 to 81 TFLOP/s net of communication in settings 6 and 9 of Li et al. 2021"),
    attention_share=Value(0.2, f"{_GUESS}: unfused attention of 2021"),
    memory_share=_MEMORY_SHARE,
    half_rate_rows=Value(32, "estimate; what figure 3 of Li et al. 2021 shows is mostly launch time"),
    launch_s=Value(1.0e-3, "Li et al. 2021, figure 3: the line through 256 (1.45 ms) and 1024 tokens (2.7 ms) at 0"),
    intra_latency_s=_NVLINK_LATENCY,
    intra_bytes_per_s=Value(25e9, "one NVLink 2.0 of 25 GB/s a direction, V100 data sheet"),
    inter_latency_s=Value(5e-5, f"{_GUESS}: TCP of a placement group"),
    inter_bytes_per_s=Value(3.125e9, "25 Gbit/s network of a p3.16xlarge"),
    link_share=_SHARE,
)

A100 = Hardware(
    name="a100-80gb",
    peak_flops=Value(312e12, "A100 data sheet, dense bf16"),
    memory_bytes_per_s=Value(2.039e12, "A100 80GB SXM data sheet"),
    memory_bytes=Value(80e9, "A100 80GB data sheet"),
    devices_per_node=Value(8, "DGX A100"),
    gemm_share=Value(0.75, f"{_GUESS}: large bf16 GEMMs"),
    attention_share=Value(0.55, "FlashAttention-2 reaches 153 to 203 of 312 TFLOP/s at head_dim 128 (its paper)"),
    memory_share=_MEMORY_SHARE,
    half_rate_rows=Value(153, "rows at which weights take as long to read as to use: peak / memory bandwidth"),
    launch_s=_LAUNCH,
    intra_latency_s=_NVLINK_LATENCY,
    intra_bytes_per_s=Value(300e9, "NVLink 3: 600 GB/s both directions, A100 data sheet"),
    inter_latency_s=_NETWORK_LATENCY,
    inter_bytes_per_s=Value(200e9, "DGX A100: eight 200 Gbit/s adapters"),
    link_share=_SHARE,
)

H100 = Hardware(
    name="h100-sxm",
    peak_flops=Value(989e12, "H100 SXM5 data sheet, dense bf16"),
    memory_bytes_per_s=Value(3.35e12, "H100 SXM5 data sheet"),
    memory_bytes=Value(80e9, "H100 SXM5 data sheet"),
    devices_per_node=Value(8, "DGX H100"),
    gemm_share=Value(0.65, f"{_GUESS}: large bf16 GEMMs under the power limit"),
    attention_share=Value(0.45, "FlashAttention-3 forward 400 to 650 TFLOP/s causal, backward less (its paper)"),
    memory_share=_MEMORY_SHARE,
    half_rate_rows=Value(295, "rows at which weights take as long to read as to use: peak / memory bandwidth"),
    launch_s=_LAUNCH,
    intra_latency_s=_NVLINK_LATENCY,
    intra_bytes_per_s=Value(450e9, "NVLink 4: 900 GB/s both directions, H100 data sheet"),
    inter_latency_s=_NETWORK_LATENCY,
    inter_bytes_per_s=Value(400e9, "DGX H100: eight 400 Gbit/s adapters"),
    link_share=_SHARE,
)

H200 = Hardware(
    name="h200-sxm",
    peak_flops=Value(989e12, "H200 SXM data sheet, dense bf16"),
    memory_bytes_per_s=Value(4.8e12, "H200 SXM data sheet"),
    memory_bytes=Value(141e9, "H200 SXM data sheet"),
    devices_per_node=Value(8, "HGX H200"),
    gemm_share=Value(0.65, f"{_GUESS}: as H100"),
    attention_share=Value(0.45, "attention takes as long as on H100 (flash-attention issue 1438)"),
    memory_share=_MEMORY_SHARE,
    half_rate_rows=Value(206, "rows at which weights take as long to read as to use: peak / memory bandwidth"),
    launch_s=_LAUNCH,
    intra_latency_s=_NVLINK_LATENCY,
    intra_bytes_per_s=Value(450e9, "NVLink 4: 900 GB/s both directions, H200 data sheet"),
    inter_latency_s=_NETWORK_LATENCY,
    inter_bytes_per_s=Value(400e9, "HGX H200 with eight 400 Gbit/s adapters"),
    link_share=_SHARE,
)

RTX4090 = Hardware(
    name="rtx4090-pcie",
    peak_flops=Value(165.2e12, "Ada architecture whitepaper: dense fp16/bf16 with fp32 accumulation"),
    memory_bytes_per_s=Value(1.008e12, "Ada architecture whitepaper"),
    memory_bytes=Value(24e9, "RTX 4090 data sheet"),
    devices_per_node=Value(8, "a common server of eight"),
    gemm_share=Value(0.85, f"{_GUESS}: large bf16 GEMMs"),
    attention_share=Value(0.6, f"{_GUESS}: FlashAttention-2 on Ada"),
    memory_share=_MEMORY_SHARE,
    half_rate_rows=Value(164, "rows at which weights take as long to read as to use: peak / memory bandwidth"),
    launch_s=_LAUNCH,
    intra_latency_s=Value(3e-5, f"{_GUESS}: two copies through host memory, no peer access"),
    intra_bytes_per_s=Value(16e9, "PCIe 4.0 x16 is 32 GB/s a direction; halved, since data passes through host memory"),
    inter_latency_s=Value(5e-5, f"{_GUESS}: Ethernet"),
    inter_bytes_per_s=Value(3.125e9, "an Ethernet adapter of 25 Gbit/s"),
    link_share=_SHARE,
)

CPU = Hardware(
    name="cpu-2core",
    dtype="fp32",
    peak_flops=Value(
        1.7e11, "one core, torch.matmul fp32 1024 x 1024, measured: 163 to 209 GFLOP/s (terapipe bench attention)"
    ),
    memory_bytes_per_s=Value(10e9, f"{_GUESS}: one of two busy cores"),
    memory_bytes=Value(11e9, "half of 23 GiB, less the system"),
    devices_per_node=Value(2, "two cores, one rank each"),
    gemm_share=Value(0.9, f"{_GUESS}: of the 1024 x 1024 product"),
    attention_share=Value(0.85, "measured: 0.81 to 0.97 of torch.matmul (docs/results/attention-cpu.json)"),
    memory_share=Value(1.0, "the bandwidth above is what is reached"),
    half_rate_rows=Value(24, f"{_GUESS}: packing and reading of weights"),
    launch_s=Value(2e-4, f"{_GUESS}: a call of a whole block and torch around it, from cold caches"),
    intra_latency_s=Value(1e-6, "shared memory, measured (docs/results/links-cpu.json)"),
    intra_bytes_per_s=Value(2e10, "shared memory, one copy of a MiB, measured (docs/results/links-cpu.json)"),
    inter_latency_s=Value(2e-4, f"{_GUESS}: gloo over Ethernet"),
    inter_bytes_per_s=Value(1.25e9, "an Ethernet adapter of 10 Gbit/s"),
    link_share=Value(1.0, "the bandwidth above is what is reached"),
)

HARDWARE: dict[str, Hardware] = {item.name: item for item in (V100, A100, H100, H200, RTX4090, CPU)}


# What a driver calls the devices described above: a part of the name, and parts that mean another board.
_DRIVER_NAMES = (
    (V100, "V100", ()),
    (A100, "A100", ("40GB", "PG5", "MIG")),
    (H100, "H100", ("PCI", "NVL", "64GB", "96GB", "MIG")),
    (H200, "H200", ("GH200", "NVL", "MIG")),
    (RTX4090, "RTX 4090", ("Laptop", "4090 D", "4090D")),
)


def hardware_of_device(driver_name: str) -> Hardware | None:
    """The description of the device that CUDA calls so ("NVIDIA H200"); None where there is none."""
    for described, part, others in _DRIVER_NAMES:
        if part in driver_name and not any(other in driver_name for other in others):
            return described
    return None


def hardware(name: str) -> Hardware:
    """The description of that name; ValueError with the nearest one otherwise."""
    if name not in HARDWARE:
        raise ValueError(f"{unknown('hardware', name, HARDWARE)} Or give a file of `terapipe profile`.")
    return HARDWARE[name]
