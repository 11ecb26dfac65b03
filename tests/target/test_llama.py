"""LlamaTarget against transformers' LlamaForCausalLM: prefill, chains, trees, commits, batches."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddtree.layers import KVCache, packs
from ddtree.target import LlamaTarget
from llama_oracle import CPU, LLAMA3, Oracle, assert_near, random_llama, round_weights, tree_rows

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {
    "gqa, head 8": {},
    "mha, head 16": {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16},
    "mqa, head 64": {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
    "groups of 3": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
    "tied head": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "both biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "head_dim above hidden / heads": {"head_dim": 16},
    "head_dim below hidden / heads": {"hidden_size": 64, "head_dim": 8},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope llama3": {"rope_parameters": LLAMA3, "head_dim": 16},
    "rms eps, one layer": {"rms_norm_eps": 0.1, "num_hidden_layers": 1},
    "vocabulary of 257": {"vocab_size": 257},
}
# A root with branches: rows are not in depth order, and the deepest path skips rows.
PARENTS = [-1, 0, 0, 1, 2, 2, 3, 5, 5, 0, 8]
PATH = [0, 2, 5, 8, 10]


@pytest.fixture(scope="module", params=CASES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(random_llama(**CASES[request.param]), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(random_llama(attention_bias=True, mlp_bias=True), tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["best", "plain"])
def linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both kinds of linear layer: the best one of this machine, and the one that works everywhere."""
    if request.param == "plain":
        monkeypatch.setattr("ddtree.layers.linear.packs", lambda device_type, dtype: False)
        return False
    return packs("cpu", torch.float32)


def load(oracle: Oracle, dtype: torch.dtype = torch.float32) -> LlamaTarget:
    return LlamaTarget.load(oracle.folder, dtype, CPU)


def tokens(count: int, oracle: Oracle, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(oracle.model.config.vocab_size), k=count)


@torch.inference_mode()
def prefill(target: LlamaTarget, cache: KVCache, ids: Sequence[int], chunks: Sequence[int], start: int = 0) -> Tensor:
    """Append ids in chunks of these sizes; returns the last row's logits."""
    assert sum(chunks) == len(ids)
    for size in chunks:
        part = torch.tensor([ids[:size]])
        features, logits = target.prefill(cache, part, torch.tensor([start]))
        assert features.shape == (1, size, len(target.feature_layers) * target.spec.hidden_size)
        assert logits.shape == (1, target.spec.vocab_size)
        ids, start = ids[size:], start + size
    return logits[0]


@torch.inference_mode()
def verify_near(
    target: LlamaTarget,
    cache: KVCache,
    oracle: Oracle,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    tolerance: float = 1e-4,
) -> None:
    """Verify one tree per sequence, and compare every row with transformers run on its own path."""
    position = torch.tensor([len(p) for p in prompts])
    logits, features = target.verify(cache, tree_rows(trees, parents), position)
    assert logits.shape[:2] == features.shape[:2] == (len(prompts), max(map(len, trees)))
    for b, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        expected, states = oracle.rows(prompt, tree, parents[b])
        assert_near(logits[b, : len(tree)], expected, tolerance)
        if target.feature_layers:
            theirs = torch.cat([states[layer] for layer in target.feature_layers], -1)
            assert_near(features[b, : len(tree)], theirs, tolerance)


def test_prefill_in_chunks(oracle: Oracle, linear: bool) -> None:
    target, ids = load(oracle), tokens(40, oracle)
    assert target.lm_head.packed == linear
    expected = oracle.logits(ids)
    cache = target.allocate(1, 64)
    start = 0
    for size in (7, 1, 20, 12):
        logits = prefill(target, cache, ids[start : start + size], [size], start)
        start += size
        assert_near(logits, expected[start - 1])
    assert_near(prefill(target, target.allocate(1, 40), ids, [40]), expected[-1])


def test_verify_of_a_chain(oracle: Oracle, linear: bool) -> None:
    target, ids = load(oracle), tokens(30, oracle)
    cache = target.allocate(1, 64)
    prefill(target, cache, ids[:20], [20])
    for length in (1, 10):
        verify_near(target, cache, oracle, [ids[:20]], [ids[20 : 20 + length]], [list(range(-1, length - 1))])


def test_tree_then_commit_then_go_on(oracle: Oracle, linear: bool) -> None:
    target, prompt, tree = load(oracle), tokens(21, oracle), tokens(len(PARENTS), oracle, 1)
    target.tap((0,))
    cache = target.allocate(1, 64)
    prefill(target, cache, prompt, [16, 5])
    verify_near(target, cache, oracle, [prompt], [tree], [PARENTS])
    target.commit(cache, torch.tensor([[*PATH, -1, -1]]), torch.tensor([21]))
    prompt = prompt + [tree[i] for i in PATH]
    assert_near(prefill(target, cache, [3], [1], len(prompt)), oracle.logits([*prompt, 3])[-1])
    prompt.append(3)
    verify_near(target, cache, oracle, [prompt], [tree], [PARENTS])
    # Only the root is kept: the next forward overwrites all the other rows.
    target.commit(cache, torch.tensor([[0, -1, -1]]), torch.tensor([len(prompt)]))
    prompt.append(tree[0])
    verify_near(target, cache, oracle, [prompt], [tree[:4]], [[-1, 0, 1, 0]])


def test_a_tree_at_the_very_start(plain_oracle: Oracle) -> None:
    target = load(plain_oracle)
    verify_near(target, target.allocate(1, 16), plain_oracle, [[]], [tokens(11, plain_oracle)], [PARENTS])


def test_a_wide_tree_fills_more_than_one_mask_word(plain_oracle: Oracle) -> None:
    target, draw = load(plain_oracle), random.Random(2)
    parents = [-1, *(draw.randrange(max(0, row - 9), row) for row in range(1, 70))]
    prompt = tokens(9, plain_oracle)
    cache = target.allocate(1, 128)
    prefill(target, cache, prompt, [9])
    verify_near(target, cache, plain_oracle, [prompt], [tokens(70, plain_oracle, 1)], [parents])


@pytest.mark.parametrize("taps", [(0,), (2,), (0, 1, 2), (2, 0)])
def test_features_are_hidden_states_after_the_tapped_layers(plain_oracle: Oracle, taps: tuple[int, ...]) -> None:
    target, ids = load(plain_oracle), tokens(12, plain_oracle)
    target.tap(taps)
    assert target.feature_layers == taps
    cache = target.allocate(1, 64)
    with torch.inference_mode():
        features, _ = target.prefill(cache, torch.tensor([ids]), torch.tensor([0]))
    states = plain_oracle(ids)[1]
    assert_near(features[0], torch.cat([states[tap] for tap in taps], -1))
    verify_near(target, cache, plain_oracle, [ids], [tokens(11, plain_oracle, 1)], [PARENTS])


BATCH = [(5, [-1, 0, 0, 1, 2]), (17, PARENTS), (1, [-1]), (11, [-1, 0, 1, 2])]
PATHS = [[0, 2, 4], PATH, [0], [0, 1, 2, 3]]


def test_a_batch_equals_each_sequence_alone(plain_oracle: Oracle, linear: bool) -> None:
    target = load(plain_oracle)
    prompts = [tokens(length, plain_oracle, b) for b, (length, _) in enumerate(BATCH)]
    trees = [tokens(len(parents), plain_oracle, 9 + b) for b, (_, parents) in enumerate(BATCH)]
    parents = [parents for _, parents in BATCH]
    cache = target.allocate(len(BATCH), 64)
    for b, prompt in enumerate(prompts):
        prefill(target, cache.view([b]), prompt, [len(prompt)])
    verify_near(target, cache, plain_oracle, prompts, trees, parents)

    path = torch.tensor([[*p, *[-1] * (6 - len(p))] for p in PATHS])
    path[3] = -1  # a sequence that has finished commits nothing
    target.commit(cache, path, torch.tensor([len(p) for p in prompts]))
    prompts = [p + [tree[i] for i in kept] for p, tree, kept in zip(prompts, trees, PATHS, strict=True)]
    prompts[3] = prompts[3][:11]
    verify_near(target, cache, plain_oracle, prompts, trees[::-1], parents[::-1])

    position = torch.tensor([len(p) for p in prompts])
    with torch.inference_mode():
        together, _ = target.verify(cache, tree_rows(trees[::-1], parents[::-1]), position)
        for b, tree in enumerate(trees[::-1]):
            alone = target.allocate(1, 64)
            prefill(target, alone, prompts[b], [len(prompts[b])])
            rows = tree_rows([tree], [parents[::-1][b]])
            logits, _ = target.verify(alone, rows, position[b : b + 1])
            assert_near(together[b, : len(tree)], logits[0], 1e-5)


@pytest.mark.parametrize("poison", [1e4, -1e4])
def test_garbage_in_unused_slots_does_not_matter(plain_oracle: Oracle, poison: float) -> None:
    """Finite garbage in scratch slots, NaN behind what any forward reads."""
    target, lengths, parents = load(plain_oracle), (3, 12), [[-1, 0, 0, 1], PARENTS]
    prompts = [tokens(n, plain_oracle, n) for n in lengths]
    trees = [tokens(len(p), plain_oracle, 7) for p in parents]
    cache = target.allocate(2, 48)
    for b, prompt in enumerate(prompts):
        cache.data[:, b, :, :16] = poison
        cache.data[:, b, :, 16:] = torch.nan
        prefill(target, cache.view([b]), prompt, [len(prompt) - 2, 2])
        cache.data[:, b, :, len(prompt) : 12 + len(PARENTS)] = poison
    verify_near(target, cache, plain_oracle, prompts, trees, parents)
    single = cache.view([1])
    single.data[:, :, :, 12 + len(PARENTS) :] = torch.nan
    verify_near(target, single, plain_oracle, prompts[1:], trees[1:], parents[1:])
    logits = prefill(target, single, [5], [1], 12)
    assert_near(logits, plain_oracle.logits([*prompts[1], 5])[-1])


def test_bfloat16_is_close_to_float32(tmp_path: Path, linear: bool) -> None:
    oracle = Oracle(round_weights(random_llama(attention_bias=True, head_dim=16)), tmp_path)
    target, prompt, tree = load(oracle, torch.bfloat16), tokens(20, oracle), tokens(len(PARENTS), oracle, 1)
    target.tap((0, 2))
    cache = target.allocate(1, 64)
    assert cache.data.dtype is torch.bfloat16
    logits = prefill(target, cache, prompt, [20])
    assert logits.dtype is torch.bfloat16
    assert_near(logits, oracle.logits(prompt)[-1], 0.03)
    verify_near(target, cache, oracle, [prompt], [tree], [PARENTS], 0.03)


def test_embedding_and_head_are_lent(oracle: Oracle) -> None:
    target, model = load(oracle), oracle.model
    ids = torch.tensor([[1, 2, 3], [0, 5, 60]])
    hidden = torch.randn(4, model.config.hidden_size)
    with torch.inference_mode():
        assert torch.equal(target.embed(ids), model.model.embed_tokens(ids))
        assert_near(target.head(hidden), model.lm_head(hidden))


def test_the_embedded_model(embedded_model: Path) -> None:
    """30 layers of real weights, whose activations are far larger than random ones."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(embedded_model, dtype=torch.float32, attn_implementation="eager")
    target = LlamaTarget.load(embedded_model, torch.float32, CPU)
    target.tap((1, 27))
    ids = random.Random(0).choices(range(100, 40000), k=24)
    cache = target.allocate(1, 64)
    tree = [7, 11, 300]
    with torch.inference_mode():
        features, logits = target.prefill(cache, torch.tensor([ids]), torch.tensor([0]))
        rows, _ = target.verify(cache, tree_rows([tree], [[-1, 0, 0]]), torch.tensor([24]))
        theirs = model(torch.tensor([[*ids, 7, 11], [*ids, 7, 300]]), output_hidden_states=True)
    assert_near(logits[0], theirs.logits[0, 23])
    assert_near(rows[0], torch.stack([theirs.logits[0, 24], theirs.logits[0, 25], theirs.logits[1, 25]]))
    assert_near(features[0, :, :576], theirs.hidden_states[2][0, :24])
    assert_near(features[0, :, 576:], theirs.hidden_states[28][0, :24])
