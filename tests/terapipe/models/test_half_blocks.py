"""The pieces around attention as one node each, against their plain form: values, gradients, and where they go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from terapipe.layer import Norm, own_gradients
from terapipe.models.half_blocks import add_linear, mlp, norm_linears
from terapipe.models.linear import Linear

HIDDEN, INNER, HEAD_DIM = 12, 20, 4


class Pieces(nn.Module):
    """A norm, q, k, v, output, gate (or none), up and down; every piece once, as a block has them."""

    def __init__(self, *, gpt: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        made = {"bias": gpt, "dtype": dtype}
        self.norm = Norm(HIDDEN, rms=not gpt, bias=gpt, eps=1e-5, dtype=dtype, device=None)
        self.query, self.key, self.value = (
            Linear(HIDDEN, 12, **made),
            Linear(HIDDEN, 8, **made),
            Linear(HIDDEN, 8, **made),
        )
        self.output = Linear(12, HIDDEN, **made)
        self.gate = None if gpt else Linear(HIDDEN, INNER, **made)
        self.up, self.down = Linear(HIDDEN, INNER, **made), Linear(INNER, HIDDEN, **made)
        with torch.no_grad():
            for parameter in self.norm.parameters():
                parameter.normal_()

    def forward(self, hidden: Tensor, turns: Tensor | None) -> list[Tensor]:
        linears = (self.query, self.key, self.value)
        hidden, q, k, v = norm_linears(hidden, self.norm, linears, head_dim=HEAD_DIM, turns=turns)
        return [mlp(add_linear(hidden, q, self.output), self.norm, self.gate, self.up, self.down), k, v]


def slices(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """(hidden, turns) of two slices."""
    torch.manual_seed(2)
    found = []
    for tokens in (5, 3):
        angles = torch.randn(2, tokens, 1, HEAD_DIM // 2, dtype=torch.float64)
        turns = torch.polar(torch.ones_like(angles), angles)
        found.append((torch.randn(2, tokens, HIDDEN, dtype=dtype, requires_grad=True), turns))
    return found


def plainly(pieces: Pieces) -> Pieces:
    """Watched modules take the plain path."""
    for module in pieces.children():
        module.register_forward_hook(lambda *_: None)
    return pieces


def gradients(pieces: Pieces, *, rotary: bool, use: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    """Values and gradients, both slices added up."""
    found = {}
    for index, (hidden, turns) in enumerate(slices()):
        outs = pieces(hidden, turns if rotary else None)
        use(outs).backward()
        found |= {f"out{index}.{position}": out.detach() for position, out in enumerate(outs)}
        assert hidden.grad is not None
        found[f"hidden{index}"] = hidden.grad
    return found | {name: parameter.grad for name, parameter in pieces.named_parameters() if parameter.grad is not None}


def weighted(outs: list[Tensor]) -> Tensor:
    return sum((out * torch.arange(out.numel()).view(out.shape).sin()).sum() for out in outs)  # type: ignore[return-value]


@pytest.mark.parametrize("owned", [False, True], ids=["autograd", "in place"])
@pytest.mark.parametrize("gpt", [False, True], ids=["llama", "gpt"])
@pytest.mark.parametrize(
    "use", [weighted, lambda outs: outs[0].sin().sum(), lambda outs: outs[1].sin().sum()], ids=["all", "mlp", "key"]
)
def test_one_node_a_piece_equals_the_plain_form(gpt: bool, owned: bool, use: Callable[[list[Tensor]], Tensor]) -> None:
    ours, plain = Pieces(gpt=gpt), plainly(Pieces(gpt=gpt))
    own_gradients(ours.parameters() if owned else ())
    got, expected = (gradients(pieces, rotary=not gpt, use=use) for pieces in (ours, plain))
    assert "Mlp" in str(ours(*slices()[0])[0].grad_fn) and "Mlp" not in str(plain(*slices()[0])[0].grad_fn)
    for name, value in expected.items():
        torch.testing.assert_close(got.get(name, torch.zeros_like(value)), value, rtol=1e-12, atol=1e-12, msg=name)


def test_owned_gradients_stay_in_their_memory() -> None:
    pieces = Pieces(gpt=False)
    own_gradients(pieces.parameters())
    (first, turns), (second, more) = slices()
    weighted(pieces(first, turns)).backward()
    before = {
        name: parameter.grad.data_ptr() for name, parameter in pieces.named_parameters() if parameter.grad is not None
    }
    assert len(before) == len(list(pieces.parameters()))
    weighted(pieces(second, more)).backward()
    assert before == {name: parameter.grad.data_ptr() for name, parameter in pieces.named_parameters()}


def test_gradients_nobody_owns_are_left_alone() -> None:
    pieces = Pieces(gpt=True)
    hidden, _ = slices()[0]
    weighted(pieces(hidden, None)).backward()
    kept = {name: parameter.grad.clone() for name, parameter in pieces.named_parameters()}
    torch.autograd.grad(weighted(pieces(hidden, None)), list(pieces.parameters()))
    assert all(torch.equal(parameter.grad, kept[name]) for name, parameter in pieces.named_parameters())


@pytest.mark.parametrize("gpt", [False, True], ids=["llama", "gpt"])
def test_frozen_parameters_get_no_gradient_and_the_others_keep_theirs(gpt: bool) -> None:
    whole, part = Pieces(gpt=gpt), Pieces(gpt=gpt)
    frozen = ("norm.weight", "key.weight", "up.weight", "down.bias", "output.weight")
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for pieces in (whole, part):
        weighted(pieces(*slices()[0])).backward()
    expected = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        assert (parameter.grad is None) == (name in frozen), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_follow_fp64(dtype: torch.dtype) -> None:
    ours, exact = Pieces(gpt=False, dtype=dtype), Pieces(gpt=False)
    exact.load_state_dict(ours.state_dict())
    (hidden, turns), *_ = slices(dtype)
    truth = hidden.detach().double().requires_grad_()
    weighted(ours(hidden, turns.to(torch.complex64))).backward()
    weighted(exact(truth, turns)).backward()
    bound = 40 * torch.finfo(dtype).eps
    pairs = [
        (hidden.grad, truth.grad),
        *((a.grad, b.grad) for a, b in zip(ours.parameters(), exact.parameters(), strict=True)),
    ]
    for got, expected in pairs:
        assert got is not None and expected is not None
        assert (got - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("gpt", [False, True], ids=["llama", "gpt"])
@pytest.mark.parametrize("granted", [None, torch.float32], ids=["any dtype", "fp32"])
def test_gradients_have_the_dtype_of_the_plain_form(gpt: bool, granted: torch.dtype | None) -> None:
    ours, plain = Pieces(gpt=gpt, dtype=torch.bfloat16), plainly(Pieces(gpt=gpt, dtype=torch.bfloat16))
    hidden, turns = slices(torch.bfloat16)[0]
    for pieces in (ours, plain):
        for parameter in pieces.parameters():
            parameter.grad_dtype = granted
        weighted(pieces(hidden, None if gpt else turns.to(torch.complex64))).backward()
    for (name, got), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and expected.grad is not None
        assert got.grad.dtype == expected.grad.dtype == (granted or torch.bfloat16), name


def test_a_graph_runs_backward_twice_and_its_inputs_are_untouched() -> None:
    pieces = Pieces(gpt=False)
    hidden, turns = slices()[0]
    kept = hidden.detach().clone()
    loss = weighted(pieces(hidden, turns))
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden)[0]) and torch.equal(hidden, kept)


def test_second_derivatives_are_refused() -> None:
    hidden, turns = slices()[0]
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(weighted(Pieces(gpt=False)(hidden, turns)), hidden, create_graph=True)


def test_compiled_and_autocast_pieces_are_taken_apart() -> None:
    pieces = Pieces(gpt=False, dtype=torch.float32)
    (hidden, turns), *_ = slices(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(pieces, fullgraph=True, backend="eager")
    for a, b in zip(
        compiled(hidden, turns.to(torch.complex64)), pieces(hidden, turns.to(torch.complex64)), strict=True
    ):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pieces(hidden, turns.to(torch.complex64))[1].dtype == torch.bfloat16
