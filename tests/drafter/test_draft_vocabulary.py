"""The list of tokens that drafts are made of: how it is made, kept, read and cut, and what the drafter does with it."""

import json
from pathlib import Path

import pytest
import torch

from ddtree.config import DRAFT_VOCABULARY, EngineConfig
from ddtree.drafter import DFlashDrafter, by_frequency, choose_vocabulary, read_vocabulary, write_vocabulary
from ddtree.errors import DamagedFile, DDTreeError, InvalidOption, ModelNotFound
from ddtree.layers import linear, packs
from ddtree.target import LlamaTarget
from dflash_reference import BASE, CPU, HIDDEN, TARGET_LAYERS, VOCAB, random_tensors, save_checkpoint
from llama_oracle import random_llama


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def _layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts of weights, where the processor has both."""
    if not request.param:
        monkeypatch.setattr(linear, "packs", lambda *of: False)
    elif not packs("cpu", torch.float32):
        pytest.skip("this processor packs no weights")


def test_the_most_frequent_come_first() -> None:
    answers = torch.tensor([0, 5, 2, 2, 0, 0, 9])
    prompts = torch.tensor([1, 0, 3, 4, 0, 7, 0])
    assert by_frequency(answers, prompts) == [6, 1, 3, 2, 5, 0, 4]
    assert by_frequency(answers, prompts, [4, 2, 4]) == [4, 2, 6, 1, 3, 5, 0], "what every cut must hold, once"


def test_a_list_is_kept_in_its_order_and_cut_from_its_beginning(tmp_path: Path) -> None:
    own, other = tmp_path / DRAFT_VOCABULARY, tmp_path / "other.json"
    assert choose_vocabulary("auto", tmp_path, 50) is None, "a folder that says nothing"
    write_vocabulary(own, [9, 3, 40, 7], 3, {"chats": 2})
    write_vocabulary(other, [1, 0], 2)
    assert read_vocabulary(own, 50) == ([9, 3, 40, 7], 3)
    assert json.loads(own.read_text())["about"] == {"chats": 2}
    chosen = {
        "auto": [3, 9, 40], "1": [9], "2": [3, 9], "4": [3, 7, 9, 40], str(other): [0, 1], "full": None,
    }  # fmt: skip
    for setting, ids in chosen.items():
        found = choose_vocabulary(setting, tmp_path, 50)
        assert (found if found is None else found.tolist()) == ids, setting
        assert found is None or found.dtype == torch.int64
    assert not list(tmp_path.glob("*.safetensors")), "loaders would take it for weights"
    for size in (0, 3):
        with pytest.raises(ValueError, match=f"size {size}"):
            write_vocabulary(other, [1, 0], size)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"size": 2, "token_ids": [1, 50]}', "token 50, and the target's vocabulary has 50"),
        ('{"size": 1, "token_ids": [1, -1]}', "token -1"),
        ('{"size": 2, "token_ids": [1, 4, 4]}', "token 4 more than once"),
        ('{"size": 3, "token_ids": [1, 2]}', "size 3, and 2 token_ids"),
        ('{"size": 0, "token_ids": [1, 2]}', "size"),
        ('{"size": 1, "token_ids": []}', "size 1, and 0 token_ids"),
        ('{"size": 1, "token_ids": [1.5]}', "token_ids"),
        ('{"size": 1, "token_ids": [true]}', "token_ids"),
        ('{"token_ids": [1]}', "size"),
        ('{"size": 1}', "token_ids"),
        ("[1]", "JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_damaged_lists_are_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / DRAFT_VOCABULARY).write_text(content)
    with pytest.raises(DDTreeError, match=words) as caught:
        choose_vocabulary("auto", tmp_path, 50)
    assert isinstance(caught.value, DamagedFile)
    assert DRAFT_VOCABULARY in str(caught.value)


def test_what_cannot_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="draft_vocab 7 needs a list by frequency"):
        choose_vocabulary("7", tmp_path, 50)
    write_vocabulary(tmp_path / DRAFT_VOCABULARY, [1, 2], 2)
    with pytest.raises(InvalidOption, match="draft_vocab 3 is more than the 2 tokens"):
        choose_vocabulary("3", tmp_path, 50)
    for name in ("missing.json", "x" * 5000, "\0"):
        with pytest.raises(ModelNotFound, match="does not exist"):
            choose_vocabulary(name, tmp_path, 50)
    for value in ("0", "-3", "", 8192, None):
        with pytest.raises(InvalidOption, match="draft_vocab must be"):
            EngineConfig(draft_vocab=value)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_layout", "one_thread")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cut_head_is_those_rows_of_the_target_s(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    random_llama(vocab_size=61, hidden_size=32, head_dim=16, tie_word_embeddings=tied).save_pretrained(tmp_path)
    target = LlamaTarget.load(tmp_path, dtype, CPU)
    ids = torch.tensor([0, 7, 8, 59, 60])
    hidden = torch.randn(15, 32).to(dtype)
    found, whole = target.draft_head(ids)(hidden), target.head(hidden)
    assert found.shape == (15, 5)
    torch.testing.assert_close(found, whole[:, ids])
    if tied:
        assert torch.equal(target.lm_head.rows(ids), target.embedding[ids])
    assert target.draft_head() == target.head, "the whole head is no copy"


@pytest.mark.usefixtures("one_thread")
def test_a_drafter_s_cut_logits_are_columns_of_the_whole(tmp_path: Path) -> None:
    """Whatever comes behind the head: the multiplier and the cap are applied to each logit alone."""
    raw = BASE | {"output_multiplier": 3.0, "final_logit_softcapping": 2.0}
    folder = save_checkpoint(tmp_path, raw, random_tensors(raw))
    write_vocabulary(folder / DRAFT_VOCABULARY, [20, 3, 11], 3)
    embedding, head = torch.randn(2, VOCAB, HIDDEN)
    ids = choose_vocabulary("auto", folder, VOCAB)
    assert ids is not None
    told = ((VOCAB, HIDDEN, TARGET_LAYERS), torch.float32, CPU)
    whole = DFlashDrafter.load(folder, lambda t: embedding[t], lambda x: x @ head.T, *told)
    cut = DFlashDrafter.load(folder, lambda t: embedding[t], lambda x: x @ head[ids].T, *told, vocabulary=ids)
    assert (whole.vocabulary, cut.vocabulary) == (None, ids)
    found = []
    for drafter in (whole, cut):
        cache = drafter.allocate(1, 40)
        features = torch.randn(1, 6, drafter.fuse.in_features, generator=torch.Generator().manual_seed(1))
        drafter.append(cache, features, torch.tensor([0]))
        root = torch.tensor([30])  # the root, as the mask, is read by the target's embedding: it may be any token
        found.append(drafter.propose(cache, root, torch.tensor([6]), 5))
    torch.testing.assert_close(found[1], found[0][..., ids])
