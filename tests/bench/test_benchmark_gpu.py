"""benchmarks/gpu.py on a CPU with tiny shapes: what its document holds, and that its plain DDTree is lossless."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.engine import Engine
from ddtree.target import LlamaTarget
from dflash_reference import BASE, CPU, random_tensors, save_checkpoint
from llama_oracle import random_llama
from scripted import CharText

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--shapes",
    "tiny",
    "--contexts",
    "24",
    "--turns",
    "2",
    "--blocks",
    "2",
]
PROMPTS = [[5, 9, 33, 2, 60], [17] * 40]
LIMIT = 16


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The script's modules."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import gpu
    import gpu_ddtree
    import gpu_pair
    import gpu_timing

    return SimpleNamespace(gpu=gpu, ddtree=gpu_ddtree, pair=gpu_pair, timing=gpu_timing)


def check_spread(spread: dict[str, Any]) -> None:
    low, high = spread["range"]
    assert low <= spread["quartiles"][0] <= spread["median"] <= spread["quartiles"][1] <= high


def check_times(times: dict[str, Any], variants: set[str]) -> None:
    assert set(times) == variants
    for row in times.values():
        check_spread(row["ms"])
        check_spread(row["over_ar"])
        assert row["ms"]["range"][0] > 0
    assert times["ar"]["over_ar"]["range"] == [1, 1]


def test_the_document_of_tiny_shapes(scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    options = ["--batches", "1,2", "--rows", "8", "--stage-rows", "8", "--parts"]
    found = scripts.gpu.main([*TINY, *options, "copy,rounds,stages,transformers,static", "--output", str(out)])
    assert json.loads(out.read_text()) == found == json.loads(capsys.readouterr().out)
    assert found["copy_gb_s"] > 0
    assert found["left_out"] == []
    assert (found["device"], found["dtype"], found["blocks"], found["turns"]) == ("cpu", "float32", 2, 2)
    assert "clock" in found["how"]["rounds"]
    assert "launched by the host" in found["how"]["stages"]
    assert set(found["rows"]) == {"tiny, context 24, batch 1", "tiny, context 24, batch 2"}
    for batch, row in zip((1, 2), found["rows"].values(), strict=True):
        assert row["model"]["rounds"] == "host"
        assert row["model"]["ar_floor_ms"] > 0
        trees = {"ar", "ar, drafter fed", "linear", "shadow-linear 15", "tree 8"}
        check_times(row["rounds"], trees)
        assert set(row["stages"]) == {"ar", "tree 8"}
        for name, stages in row["stages"].items():
            every = ["draft", "build", "verify", "accept", "commit"]
            assert list(stages["ms"]) == (every[2:] if name == "ar" else every)
            medians = [stage["median"] for stage in stages["ms"].values()]
            assert sum(medians) == pytest.approx(stages["round_ms"]["median"], abs=1e-3)  # of two blocks: the mean
        eager = {"eager ddtree 16", "eager ddtree 64"} if batch == 1 else set()
        check_times(row["transformers"]["times"], {"ar", "tree 16", "tree 64", "generate"} | eager)
        check_times(row["static"]["times"], {"ar", "generate, static"})
    same = found["rows"]["tiny, context 24, batch 1"]["transformers"]["same_tokens"]
    assert (same["generate"], same["eager ddtree"]) == (same["of"], same["of"])
    assert same["acceptance_length"] > 1.1  # so that paths were gathered out of the cache


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Any, DFlashDrafter]:
    """A small random pair: in the engine, and in transformers with its drafter."""
    model = random_llama(num_hidden_layers=6)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    folder, files = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    model.save_pretrained(folder)
    save_checkpoint(files, BASE, random_tensors(BASE))
    target, sizes = LlamaTarget.load(folder, torch.float32, CPU), (61, 32, 6)
    drafter = DFlashDrafter.load(files, target.embed, target.head, sizes, torch.float32, CPU)
    engine = Engine(target, drafter, CharText([]), EngineConfig(max_running_requests=4))  # type: ignore[arg-type]
    theirs = DFlashDrafter.load(files, model.get_input_embeddings(), model.lm_head, sizes, torch.float32, CPU)
    return engine, model, theirs


def test_everybody_answers_alike_in_float32(scripts, pair) -> None:
    runs = scripts.pair.Runs(CPU)
    found = runs.compare(scripts.pair.alone_variants(*pair, PROMPTS, LIMIT), 1)
    ours = {"ar", "linear", "tree 16", "tree 32", "tree 64"}
    assert set(found) == ours | {"transformers", "eager ddtree 16", "eager ddtree 64"}
    assert [len(answer) for answer in runs.answers["ar"]] == [LIMIT] * 2
    for row in found.values():
        assert (row["equal"], row["answers"]) == (2, 2)
        check_spread(row["tok_s"])
    for rows in (16, 64):  # the same trees, so the same rounds
        assert found[f"eager ddtree {rows}"]["acceptance_length"] == found[f"tree {rows}"]["acceptance_length"] > 1.1
    together = scripts.pair.Runs(CPU).compare(scripts.pair.together_variants(pair[0], PROMPTS, LIMIT), 1)
    assert set(together) == ours
    assert all(row["equal"] == 2 for row in together.values())


def test_an_end_token_and_a_limit_cut_an_eager_answer(scripts, pair) -> None:
    engine, model, drafter = pair
    loop = scripts.ddtree.EagerDDTree(model, drafter, 63, 16, 200)
    with torch.inference_mode():
        whole = loop.generate(PROMPTS[0], LIMIT)
        assert loop.generate(PROMPTS[0], LIMIT, ends=[whole[5]]) == whole[: whole.index(whole[5]) + 1]
        assert loop.generate(PROMPTS[0], 7) == whole[:7]
    params = SamplingParams(max_tokens=LIMIT)
    assert whole == engine.generate([PROMPTS[0]], [params], Speculation("ar"))[0].token_ids


def test_rounds_can_be_run_again_from_the_same_place(scripts, pair) -> None:
    _, model, drafter = pair
    loop = scripts.ddtree.EagerDDTree(model, drafter, 15, 16, 200)
    with torch.inference_mode():
        root = loop.start(PROMPTS[1])
        first = [loop.round() for _ in range(4)]
        loop.rewind(len(PROMPTS[1]), root)
        assert [loop.round() for _ in range(4)] == first


def test_blocks_alternate_and_the_first_is_not_counted(scripts) -> None:
    order: list[str] = []

    def block(name: str, ms: float):
        return lambda: order.append(name) or ms * len(order)

    found = scripts.timing.alternate_blocks({"ar": block("ar", 1.0), "tree": block("tree", 2.0)}, 2)
    assert order == ["ar", "tree", "ar", "tree", "tree", "ar"]
    assert found == {"ar": [3, 6], "tree": [8, 10]}
    summary = scripts.timing.summary(found, "ms")
    assert summary["tree"]["ms"] == {"median": 9, "quartiles": [8.5, 9.5], "range": [8, 10]}
    assert summary["tree"]["over_ar"]["range"] == [1.6667, 2.6667]


def test_parts_that_fail_or_come_too_late_are_named(scripts, tmp_path: Path, capsys) -> None:
    out = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match="1"):
        scripts.gpu.main([*TINY, "--parts", "pair", "--model", str(tmp_path / "none"), "--output", str(out)])
    assert "ModelNotFound" in json.loads(out.read_text())["pair"]["error"]
    found = scripts.gpu.main([*TINY, "--parts", "copy,rounds", "--batches", "1", "--deadline", "-1"])
    assert found["left_out"] == ["device: copy_gb_s", "tiny, context 24, batch 1: model"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--parts", "rounds,nothing"),
        ("--shapes", "qwen9"),
        ("--rows", "1,8"),
        ("--rows", "999"),
        ("--blocks", "0"),
        ("--parts", "draft8"),
    ],
)
def test_options_that_mean_nothing_are_refused(scripts, option: str, value: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        scripts.gpu.read_options([*TINY, option, value])
    assert option in capsys.readouterr().err


def test_quick_gives_way_to_what_is_typed(scripts) -> None:
    args = scripts.gpu.read_options(["--device", "cpu", "--quick", "--batches", "2,8", "--parts", "copy,pair"])
    assert (args.contexts, args.batches, args.blocks, args.deadline) == ([2048], [2, 8], 3, 150)
    assert args.parts == ["copy", "pair"]


@pytest.mark.full
@pytest.mark.usefixtures("embedded_model")
def test_the_embedded_pair(scripts) -> None:
    options = ["--parts", "pair", "--prompts", "2", "--max-tokens", "24", "--blocks", "1", "--at-once", "2"]
    found = scripts.gpu.main(["--device", "cpu", "--dtype", "float32", *options])["pair"]
    assert all(row["equal"] == 2 for count in (1, 2) for row in found[f"{count} at once"].values())
    assert found["1 at once"]["eager ddtree 64"]["acceptance_length"] > 1.5
