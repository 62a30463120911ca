"""AdamW over this process's named parameters, with warm-up, cosine and clipping by the global gradient norm.

bf16 (and fp16) parameters keep fp32 master weights, and their gradients accumulate in fp32: slices add many small
terms. fp32 and fp64 parameters are their own masters. `masters` is what a checkpoint saves, so it does not depend
on the dtype.

The trap: the norm covers the whole model, so it comes from the engine. A norm of local gradients would clip each rank
by another factor, and tied copies would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from terapipe.train.config import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")  # names of torch.optim.AdamW's state, and of the checkpoint's keys


def learning_rate(step: int, settings: OptimizerSettings, *, steps: int) -> float:
    """Of the 0-based step: linear warm-up to the peak, then a cosine down to the minimum at the last of `steps`."""
    peak, least = settings.learning_rate, settings.min_learning_rate
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    span = max(1, steps - 1 - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    return least + (peak - least) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW. `parameters`: global name -> parameter, those this process owns; only matrices are decayed.

    A parameter under two names (tied, in one process) is updated once, under the first. `step_count`: updates so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        *,
        steps: int,
    ) -> None:
        self.settings = settings
        self.steps = steps
        self.step_count = 0
        self.parameters: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in dict(parameters).items():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                self.parameters[name] = parameter
        self.masters: dict[str, Tensor] = {name: _master(parameter) for name, parameter in self.parameters.items()}
        matrices = [master for master in self.masters.values() if master.dim() >= 2]
        vectors = [master for master in self.masters.values() if master.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw = (
            torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, lr=0.0, fused=True)
            if groups
            else None
        )
        # Made now rather than at the first step, so that a checkpoint loads into them.
        for master in self.masters.values():
            state = self._state(master)
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(master, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, grad_norm: float) -> float:
        """Update the parameters from their gradients, clipped by the whole model's `grad_norm`. Returns the rate.

        RuntimeError, before anything is written, if the norm is not finite.
        """
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"optimizer: the gradient norm at step {self.step_count} is {grad_norm}; weights are unchanged. Lower "
                "the learning rate, warm up for longer, or look for broken data in this step's batch; resume from a "
                "checkpoint well before (--checkpoint.load-step), since weights that grew stay in the newest."
            )
        rate = learning_rate(self.step_count, self.settings, steps=self.steps)
        if self._adamw is not None:
            self._lend_gradients(clip_factor(grad_norm, self.settings.clip))
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            for _, master in self._separate_masters():
                master.grad = None
            self.publish()
        self.step_count += 1
        return rate

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Of every master its "exp_avg" and "exp_avg_sq": the optimizer's state, live."""
        states = {name: self._state(master) for name, master in self.masters.items()}
        return {name: {moment: state[moment] for moment in MOMENTS} for name, state in states.items()}

    @torch.no_grad()
    def restore(self, step_count: int) -> None:
        """Continue after `step_count` updates; masters and moments have been overwritten with a checkpoint's values."""
        self.step_count = step_count
        for master in self.masters.values():
            self._state(master)["step"].fill_(step_count)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that have one."""
        rounded = [(self.parameters[name], master) for name, master in self._separate_masters()]
        if rounded:
            torch._foreach_copy_([parameter for parameter, _ in rounded], [master for _, master in rounded])

    def _state(self, master: Tensor) -> dict[str, Tensor]:
        assert self._adamw is not None
        state: dict[str, Tensor] = self._adamw.state[master]
        return state

    def _lend_gradients(self, factor: float) -> None:
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if factor < 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        for name, master in self._separate_masters():
            master.grad = self.parameters[name].grad

    def _separate_masters(self) -> list[tuple[str, Tensor]]:
        return [(name, master) for name, master in self.masters.items() if master is not self.parameters[name]]


def clip_factor(grad_norm: float, clip: float) -> float:
    """What gradients are multiplied by so that their norm is at most `clip`; 1 without clipping (clip 0)."""
    return min(1.0, clip / grad_norm) if clip > 0 and grad_norm > 0 else 1.0


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    parameter.grad_dtype = torch.float32
    return parameter.detach().float()
