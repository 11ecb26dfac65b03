"""What tests of a round's ends share: candidates, rooms, staged rounds, graphs."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from ddtree.sglang import rows as lay
from ddtree.sglang.adapters import ADAPTERS
from ddtree.sglang.head import Drafted
from ddtree.sglang.options import Options
from ddtree.sglang.room import Room

BLOCK, VOCABULARY, CONTEXT, RUNNING, SIZE = 8, 50, 60, 2, 3
LENGTHS, HIDDEN = [7, 30, 0], 16


class Head:
    """Candidates that are there already, and the states behind them."""

    block = BLOCK

    def __init__(self, device: torch.device, seed: int = 1, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        log_q = (-torch.rand(SIZE, BLOCK - 1, 4, generator=generator) * 3).sort(-1, descending=True).values
        self.log_q = log_q.to(device)
        self.tokens = torch.rand(SIZE, BLOCK - 1, VOCABULARY, generator=generator).topk(4).indices.to(device)
        self.states = torch.randn(SIZE, BLOCK - 1, HIDDEN, generator=generator).to(device, dtype)
        self.seen: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor) -> None:
        self.seen.append(hidden)

    def read(self, size: int) -> Drafted:
        return Drafted(log_q=self.log_q[:size], tokens=self.tokens[:size], states=self.states[:size])


def make_room(
    device: torch.device, mode: str = "tree", backend: str = "triton", fits: int = SIZE, deterministic: bool = False
) -> Room:
    options = Options(mode, 15)
    width = options.rows(BLOCK)
    buffer = torch.full((SIZE * width * (CONTEXT + width),), 9, dtype=torch.uint8, device=device)
    runner = SimpleNamespace(
        server_args=SimpleNamespace(
            get_attention_backends=lambda: (backend, backend),
            speculative_attention_mode="prefill",
            enable_deterministic_inference=deterministic,
        ),
        model_config=SimpleNamespace(context_len=CONTEXT),
        attn_backend=SimpleNamespace(verify_mask=SimpleNamespace(buffer=buffer, fits=lambda size: size <= fits)),
    )
    usual = options.plan(None, BLOCK)
    shape = {"width": width, "depth": BLOCK - 1, "usual": usual}
    return Room(SimpleNamespace(model_runner=runner, device=device, sglang=ADAPTERS["0.5.17"], **shape), SIZE)


def staged(room: Room, committed: int, more: int = 0) -> None:
    """A round of two requests in a graph of three; the third has what an earlier round left."""
    device = room.commits.device
    table = torch.randperm(3 * 100, generator=torch.Generator().manual_seed(more)).view(3, 100).to(device) + 1
    for size in (SIZE, RUNNING):
        lengths = torch.tensor(LENGTHS[:size], device=device) + more
        bonus, pool = torch.tensor([3, 4, 5][:size], device=device), torch.tensor([2, 0, 1][:size], device=device)
        lay.stage(bonus, lengths, pool, table, room.state, room.view(size).block, 1, room.commits, committed)


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A replay of its graph, where there are graphs."""
    for _ in range(2):
        step()
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay
