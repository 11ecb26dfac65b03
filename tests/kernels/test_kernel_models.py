"""Target and drafter through the kernels and through torch: small random models, in the interpreter or on a GPU."""

from pathlib import Path

import pytest
import torch

from ddtree.drafter import DFlashDrafter
from ddtree.kernels import backend
from ddtree.target import LlamaTarget
from ddtree.tree import RoundState, best_first, chain
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from llama_oracle import random_llama

CHANGES = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    fields = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 6, "max_position_embeddings": 128}
    random_llama(**fields, head_dim=16).save_pretrained(target)
    raw = change(BASE, CHANGES)
    return target, save_checkpoint(drafter, raw, random_tensors(raw))


class Pair:
    """Target and drafter with caches that hold two prompts in slots 2 and 0."""

    def __init__(
        self, folders: tuple[Path, Path], device: torch.device, dtype: torch.dtype, invariant: bool = True
    ) -> None:
        self.target = LlamaTarget.load(folders[0], dtype, device, invariant)
        spec = self.target.spec
        sizes = (spec.vocab_size, spec.hidden_size, spec.num_layers)
        self.drafter = DFlashDrafter.load(folders[1], self.target.embed, self.target.head, sizes, dtype, device)
        self.target.tap(self.drafter.config.target_layer_ids)
        self.cache, self.context = self.target.allocate(3, 100), self.drafter.allocate(3, 100)
        self.prompts = [[5, 9, 33, 2, 7, 7, 8], [(i * 7) % 61 for i in range(40)]]
        self.slots = [2, 0]
        for slot, prompt in zip(self.slots, self.prompts, strict=True):
            start = torch.zeros(1, dtype=torch.int64, device=device)
            ids = torch.tensor([prompt], device=device)
            features, _ = self.target.prefill(self.cache.view([slot]), ids, start)
            self.drafter.append(self.context.view([slot]), features, start)
        self.position = torch.tensor([len(p) for p in self.prompts], device=device)
        self.root = torch.tensor([3, 4], device=device)

    def round(self) -> dict[str, torch.Tensor]:
        """A draft, a verify of two trees of different sizes, a commit, and the next draft."""
        found = {}
        view, context = self.cache.view(self.slots), self.context.view(self.slots)
        depths = self.drafter.config.depths
        found["first draft"] = self.drafter.propose(context, self.root, self.position, depths)
        state = RoundState.allocate(2, 10, depths, self.position.device)
        state.tokens[:, 0] = self.root
        nodes = [best_first([[-0.5, -1.0, -1.5]] * 4, 9), chain(5)]
        state.lay(nodes, [[[11, 12, 13], [14, 15, 16], [17, 18, 19], [20, 21, 22]], [[1], [2], [3], [4], [5]]])
        logits, features = self.target.verify(view, state.rows, self.position)
        for index, tree in enumerate(nodes):
            found[f"logits {index}"] = logits[index, : len(tree)]
            found[f"features {index}"] = features[index, : len(tree)]
        row = max(range(len(nodes[0])), key=nodes[0].depths.__getitem__)
        kept = []
        while row >= 0:
            kept.insert(0, row)
            row = nodes[0].parents[row]
        path = torch.full((2, 6), -1, dtype=torch.int64, device=self.position.device)
        path[0, : len(kept)] = torch.tensor(kept)
        path[1, :3] = torch.tensor([0, 1, 2])
        self.target.commit(view, path, self.position)
        counts = [len(kept), 3]
        features = features.gather(1, path.clamp(min=0).unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        self.drafter.append(context, features, self.position, counts)
        after = self.position + torch.tensor(counts, device=self.position.device)
        found["next draft"] = self.drafter.propose(context, self.root, after, depths)
        state.lay([chain(2), chain(1)], [[[8], [9]], [[8]]])
        found["next logits"] = self.target.verify(view, state.rows, after)[0][:, :2]
        return found


HALF = pytest.param(torch.bfloat16, marks=[] if torch.cuda.is_available() else [pytest.mark.full])


FAST = pytest.param(False, marks=[] if torch.cuda.is_available() else [pytest.mark.full])


@pytest.mark.parametrize("invariant", [True, FAST])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@torch.inference_mode()
def test_a_round_through_the_kernels_equals_one_through_torch(folders, device, dtype, invariant, monkeypatch) -> None:
    monkeypatch.setattr(backend, "KINDS", set())
    plain = Pair(folders, device, dtype)
    expected = plain.round()
    monkeypatch.setattr(backend, "KINDS", {device.type})
    fast = Pair(folders, device, dtype, invariant)
    tolerance = 2e-4 if dtype is torch.float32 else 0.12
    for name, found in fast.round().items():
        scale = float(expected[name].float().abs().max())
        difference = float((found.float() - expected[name].float()).abs().max())
        assert difference < tolerance * max(scale, 1.0), (name, difference)
