"""Products against torch, a row's bits in any company, and compilation for other cards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ddtree.errors import InvalidOption
from ddtree.kernels import add_norm, backend, matmul, swiglu
from ddtree.kernels.matmul import ProductTiles, Rounded, gated, interleave_gate_up, product, product_parts
from ddtree.layers import GatedLinear, Linear, RMSNorm

CLOSE = {torch.float16: {"atol": 2e-3, "rtol": 2e-3}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}
SMALL = ProductTiles(64, 64, 2, 4)
COMPILED = Path(__file__).parent / "compiled_matmul.py"


def within_poison(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """A random matrix in the middle of NaN."""
    rows, columns = shape
    memory = torch.full((rows + 8, columns), float("nan"), dtype=dtype, device=device)
    memory[4 : 4 + rows] = (torch.randn(rows, columns) * scale).to(dtype)
    return memory[4 : 4 + rows]


def case(rows, columns, inner, dtype, device):
    torch.manual_seed(rows + columns)
    x = within_poison(rows, inner, dtype=dtype, device=device)
    return x, within_poison(columns, inner, dtype=dtype, device=device, scale=inner**-0.5)


@pytest.fixture(params=[True, False], ids=["bulk", "pointers"])
def bulk(request, monkeypatch):
    if torch.cuda.is_available():
        if not request.param:
            card = matmul._card
            monkeypatch.setattr(matmul, "_card", lambda device: (False, card(device)[1]))
    else:
        monkeypatch.setattr(matmul, "_card", lambda device: (request.param, True))
    return request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "inner", "splits"), [(1, 70, 320, 1), (5, 130, 1032, 2), (19, 64, 520, 3), (130, 72, 264, 1)]
)
def test_equals_torch(device, bulk, rows, columns, inner, splits, dtype):
    x, weight = case(rows, columns, inner, dtype, device)
    bias = torch.randn(columns, device=device).to(dtype)
    want = F.linear(x.float(), weight.float())
    tiles = SMALL if rows < 100 else ProductTiles(64, 128, 2, 8)
    torch.testing.assert_close(product(x, weight, None, tiles, splits), want.to(dtype), **CLOSE[dtype])
    biased = product(x, weight, bias, tiles, splits)
    torch.testing.assert_close(biased, (want + bias.float()).to(dtype), **CLOSE[dtype])
    parts = product_parts(x, weight, tiles, splits)
    assert len(parts) == splits
    torch.testing.assert_close(parts.sum(0), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "splits", "biased"), [(3, 1, True), (17, 2, False)])
def test_gated_equals_the_layers_own(device, rows, splits, biased):
    x, weight = case(rows, 140, 528, torch.bfloat16, device)
    bias = torch.randn(140, device=device).bfloat16() if biased else None
    interleaved = interleave_gate_up(weight)
    got = gated(x, interleaved, interleave_gate_up(bias) if bias is not None else None, SMALL, splits)
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    torch.testing.assert_close(got, F.silu(gate) * up, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["plain", "gated", "parts"])
def test_weights_in_8_bits(device, bulk, kind):
    """As near as whole numbers from -127 to 127 can be: the product of those numbers itself is right."""
    x, weight = case(5, 140, 528, torch.bfloat16, device)
    rounded = Rounded.of(weight)
    stands_for = rounded.values.float() * rounded.scale[:, None]
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((stands_for - weight.float()).abs() <= 0.501 * step).all()
    want = F.linear(x.float(), stands_for)
    if kind == "gated":
        want = F.silu(want[:, ::2]) * want[:, 1::2]
        torch.testing.assert_close(gated(x, rounded, None, SMALL).float(), want, atol=2e-2, rtol=2e-2)
    elif kind == "parts":
        torch.testing.assert_close(product_parts(x, rounded, SMALL, 2).sum(0), want, atol=1e-3, rtol=1e-3)
    else:
        torch.testing.assert_close(
            product(x, rounded[8:80], None, SMALL, 2).float(), want[:, 8:80], atol=1e-2, rtol=1e-2
        )


def test_a_row_of_zeros_in_8_bits():
    rounded = Rounded.of(torch.zeros(2, 16))
    assert not rounded.values.any()
    assert rounded.scale.isfinite().all()


@pytest.mark.parametrize("biased", [False, True])
def test_parts_into_the_stream(device, biased):
    x = torch.randn(3, 100, device=device)
    parts = torch.randn(2, 3, 100, device=device)
    bias = torch.randn(100, device=device).half() if biased else None
    norm = RMSNorm(torch.rand(100, device=device) + 0.5, 1e-5)
    stream, kept = x.clone(), torch.empty(3, 300, device=device)
    states = add_norm(stream, parts, norm.scale, norm.squares, torch.float16, kept[:, 100:200], bias)
    delta = parts[0] + parts[1]
    want = x + (delta if bias is None else delta + bias.float())
    assert torch.equal(stream, want)
    assert torch.equal(kept[:, 100:200], want)
    torch.testing.assert_close(states, norm(stream, torch.float16))


def test_gate_and_up_in_turns(device):
    gate_up = torch.randn(3, 2 * 1100, device=device).bfloat16()
    assert torch.equal(swiglu(interleave_gate_up(gate_up.T).T.contiguous(), turns=True), swiglu(gate_up))


@pytest.mark.parametrize("biased", [False, True])
def test_layers_are_the_same_for_few_rows(device, biased, monkeypatch):
    """Rows of a round go through the kernels, a prompt's through the vendor's products."""
    monkeypatch.setattr(backend, "KINDS", {device.type})
    torch.manual_seed(0)
    weights = [(torch.randn(72, 64, device=device) / 8).bfloat16() for _ in range(3)]
    bias = torch.randn(144, device=device).bfloat16() if biased else None
    x, norm = torch.randn(5, 64, device=device).bfloat16(), RMSNorm(torch.rand(72, device=device) + 0.5, 1e-5)
    linear, both = Linear(weights[0], bias[:72] if biased else None), GatedLinear(weights[1], weights[2], bias)
    assert linear.kernel
    assert both.turns
    torch.testing.assert_close(linear(x, few=True), linear(x), **CLOSE[torch.bfloat16])
    halves = bias.chunk(2) if biased else (None, None)
    gate, up = F.linear(x, weights[1], halves[0]), F.linear(x, weights[2], halves[1])
    torch.testing.assert_close(both(x), F.silu(gate) * up, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(both(x, few=True), both(x), atol=2e-2, rtol=2e-2)
    streams = torch.randn(5, 72, device=device).repeat(2, 1, 1)
    states = [linear.add_norm(streams[i], x, norm, torch.float16, None, few) for i, few in enumerate((True, False))]
    torch.testing.assert_close(streams[0], streams[1], **CLOSE[torch.bfloat16])
    torch.testing.assert_close(states[0], states[1], **CLOSE[torch.bfloat16])


def test_layers_in_8_bits(device, monkeypatch):
    """Through the kernels for any number of rows, near what the weights themselves give."""
    monkeypatch.setattr(backend, "KINDS", {device.type})
    torch.manual_seed(0)
    weights = [(torch.randn(72, 64, device=device) / 8).bfloat16() for _ in range(3)]
    x, norm = torch.randn(5, 64, device=device).bfloat16(), RMSNorm(torch.rand(72, device=device) + 0.5, 1e-5)
    exact, rounded = Linear(weights[0]), Linear(Rounded.of(weights[0]))
    for few in (False, True):
        torch.testing.assert_close(rounded(x, few), exact(x), atol=0.05, rtol=0.05)
    both = [GatedLinear(*weights[1:], rounded=how)(x) for how in (False, True)]
    torch.testing.assert_close(both[1], both[0], atol=0.1, rtol=0.1)
    streams = torch.randn(5, 72, device=device).repeat(2, 1, 1)
    for stream, linear in zip(streams, (exact, rounded), strict=True):
        linear.add_norm(stream, x, norm, torch.float16, None, few=True)
    torch.testing.assert_close(streams[1], streams[0], atol=0.05, rtol=0.05)
    monkeypatch.setattr(backend, "KINDS", set())
    with pytest.raises(InvalidOption, match="8 bits"):
        Linear(Rounded.of(weights[0]))


def test_a_prompt_does_not_take_the_kernels(device, monkeypatch):
    monkeypatch.setattr(backend, "KINDS", {device.type})
    monkeypatch.setattr(matmul, "jit", None)
    linear = Linear(torch.randn(72, 64, device=device).bfloat16())
    linear(torch.randn(5, 64, device=device).bfloat16())


@pytest.fixture
def _steady_dot(monkeypatch):
    """The interpreter multiplies by numpy, whose bits depend on the shape. Tensor cores go along k step by step."""
    from triton.runtime import interpreter

    def values(handle):
        if handle.dtype.scalar == interpreter.tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(self, a, b, d, *_):
        left, right, total = values(a), values(b), d.data
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    if not torch.cuda.is_available():
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("_steady_dot")
@pytest.mark.parametrize("kind", ["plain", "gated", "parts"])
def test_rows_do_not_meet(device, kind):
    """The bits of a row: alone, in larger batches, at other places, beside NaN; and with every shape of program."""
    _, weight = case(1, 128, 1096, torch.bfloat16, device)
    x = torch.randn(80, weight.shape[1], device=device).bfloat16()
    calls = {
        "plain": lambda x, tiles=None: product(x, weight, None, tiles, 2),
        "gated": lambda x, tiles=None: gated(x, weight, None, tiles, 2),
        "parts": lambda x, tiles=None: product_parts(x, weight, tiles, 2).transpose(0, 1),
    }
    call = calls[kind]
    alone = torch.cat([call(x[i : i + 1].contiguous()) for i in range(3)])
    assert torch.equal(call(x[:2].contiguous()), alone[:2])
    for rows in (17, 33, 80):
        beside = x[:rows].clone()
        beside[3:] = float("nan")
        assert torch.equal(call(beside)[:3], alone)
        assert torch.equal(call(beside.flip(0))[-3:].flip(0), alone)
    for tiles in (ProductTiles(128, 64, 2, 4), ProductTiles(64, 256, 2, 8)):
        assert torch.equal(call(x[:2].contiguous(), tiles), alone[:2])


def test_splits_by_shape_alone():
    shapes = ((151936, 4096), (24576, 4096), (6144, 4096), (4096, 20480), (960, 576))
    assert [matmul.pick_splits(n, k, parts=False) for n, k in shapes] == [1, 1, 1, 4, 1]
    shapes = ((4096, 4096), (4096, 12288), (576, 576), (576, 1536))
    assert [matmul.pick_splits(n, k, parts=True) for n, k in shapes] == [4, 4, 3, 6]


@pytest.mark.parametrize("large", [True, False])
def test_programs_share_the_rows_where_they_are_few(large):
    assert [matmul.rows_of(n) for n in (1, 16, 17, 64, 65, 500)] == [16, 16, 32, 64, 128, 128]
    picked = {(m, n): matmul.pick_tiles(m, n, 1, large).rows for m in (1, 64, 128, 512) for n in (576, 24576)}
    assert picked == {
        (1, 576): 16, (64, 576): 32, (128, 576): 32, (512, 576): 32,
        (1, 24576): 16, (64, 24576): 64, (128, 24576): 128, (512, 24576): 128,
    }  # fmt: skip


def test_refusals(device):
    x, weight = case(2, 64, 264, torch.float16, device)
    for bad_x, bad_weight in ((x.bfloat16(), weight), (x[:, :256], weight[:, :256]), (x.float(), weight.float())):
        with pytest.raises(ValueError, match="do not fit"):
            product(bad_x, bad_weight)
    with pytest.raises(ValueError, match="in turns"):
        gated(x, weight[:63])
    with pytest.raises(ValueError, match="fit the stream"):
        add_norm(x.float(), x[:, :8].float(), x[0], 0.1, torch.float16)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_compiles_for(capability):
    """Within the card's shared memory, on its own matrix instructions, the loads of weights ahead of the products."""
    command = [sys.executable, str(COMPILED), str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.splitlines()[-1])
    instructions = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
    for name, found in report.items():
        assert found["shared"] <= found["limit"], name
        assert found["stack"] <= 64, name
        assert found["registers"] <= 255, name
        whole = name.startswith("8 bits") and capability == 100  # its tensor cores of the fifth kind take no int8
        assert found["mma.sync" if whole else instructions[capability]] > 0, name
        assert found["cp.async"] > 0, name
