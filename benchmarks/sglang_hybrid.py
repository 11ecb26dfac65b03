"""A hybrid target (Gated DeltaNet) inside SGLang: its output must depend neither on the drafter nor on the budget.

python benchmarks/sglang_hybrid.py --out FILE.json

Makes a small random Qwen3-Next whose head has four tokens alone, and two DFlash drafters: one that proposes those four
at every depth, so that a path through the tree is nearly always right and bends at every node, and a random one, which
is nearly always wrong. A recurrent state taken from a wrong row would change all that follows: every token is judged by
its float32 regret in transformers, which must stay within --limit, or within what plain decoding shows itself (linear
is SGLang's own DFLASH: within what that shows). Convolution states are float16 like the model, as SGLang's kernel for
trees wants them. With --tp 2 servers run one after another.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

import sglang_judge as judge
import sglang_peers as peers
from common import machine
from sglang_servers import Ended, Server, Settings, each, end_in_order
from sglang_start import bring_up

SIZE, HIDDEN, LAYERS, BLOCK = 512, 256, 4, 8
MASK, SAID = 1, (10, 11, 12, 13)  # the drafter's mask token, and the only tokens that are ever said
TAPS = [1, 2]
SERVERS = {
    "right": ["plain", "dflash", "linear", "tree7", "tree15", "tree31", "shadow15", "tree31@eager"],
    "random": ["dflash", "tree15", "tree31"],
}


def make_target(folder: Path) -> None:
    """Direction 0 of every state is the same for all tokens, and lifts the four tokens above all others."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=SIZE, hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=2,
        linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
        shared_expert_intermediate_size=128, max_position_embeddings=2048, tie_word_embeddings=False,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5 if "conv1d" not in name else 0.5)
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")):
                weight[..., 0, :] = 0  # no layer writes to direction 0
        embedding = model.model.embed_tokens.weight
        embedding.normal_(0, 1.0)
        embedding[:, 0] = 4.0
        embedding[MASK] = 0
        embedding[MASK, 0] = 4.0
        head = model.lm_head.weight
        head.zero_()
        head[list(SAID)] = torch.randn(len(SAID), HIDDEN) * 0.5
        head[list(SAID), 0] = 12.0
    model.half().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())  # SGLang reads the layers' kinds from an interval
    (folder / "config.json").write_text(json.dumps(written | {"full_attention_interval": LAYERS}))
    words = {f"w{index}": index for index in range(SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(folder)


def make_drafter(folder: Path, *, right: bool) -> None:
    """right: no layer adds anything, so that every depth shows the mask token's embedding: the four tokens, alike."""
    torch.manual_seed(2)
    folder.mkdir(parents=True, exist_ok=True)
    heads, shared, head, inner = 4, 2, 64, 512
    shapes = {
        "self_attn.q_proj": (heads * head, HIDDEN), "self_attn.k_proj": (shared * head, HIDDEN),
        "self_attn.v_proj": (shared * head, HIDDEN), "self_attn.o_proj": (HIDDEN, heads * head),
        "mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN), "mlp.down_proj": (HIDDEN, inner),
    }  # fmt: skip
    scale = 0.02 if right else 3.0
    weights = {"fc.weight": torch.randn(HIDDEN, len(TAPS) * HIDDEN) * 0.05, "hidden_norm.weight": torch.ones(HIDDEN)}
    weights["norm.weight"] = torch.ones(HIDDEN)
    for layer in range(2):
        for name, shape in shapes.items():
            quiet = right and name.endswith(("o_proj", "down_proj"))
            weights[f"layers.{layer}.{name}.weight"] = torch.randn(shape) * (0 if quiet else scale * 0.1)
        for name, width in {"self_attn.q_norm": head, "self_attn.k_norm": head}.items():
            weights[f"layers.{layer}.{name}.weight"] = torch.ones(width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    save_file({k: v.half() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": SIZE, "hidden_size": HIDDEN,
        "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": shared, "head_dim": head, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "float16", "block_size": BLOCK,
        "num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def prompts(count: int) -> list[list[int]]:
    """Random tokens, of growing length."""
    torch.manual_seed(3)
    return [torch.randint(20, SIZE, (5 + 13 * index,)).tolist() for index in range(count)]


def ask(server: Server, asked: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Each prompt alone, and once more behind its own beginning, which the prefix cache then has."""
    found = [server.generate(ids, tokens) for ids in asked]
    again = [server.generate([*ids, *a["output_ids"][:40]], 20) for ids, a in zip(asked, found, strict=True)]
    meta = [answer["meta_info"] for answer in found]
    rounds = sum(one.get("spec_verify_ct") or tokens for one in meta)
    return {
        "ids": [answer["output_ids"] for answer in found],
        "again": [answer["output_ids"] for answer in again],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in again],
        "tokens_a_round": round(sum(len(answer["output_ids"]) for answer in found) / rounds, 3),
    }


def main() -> None:
    """See the top of the file."""
    end_in_order()
    known = list(dict.fromkeys(name for names in SERVERS.values() for name in names))
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--prompts", type=int, default=6)
    made.add_argument("--max-tokens", type=int, default=96)
    made.add_argument("--start-s", type=float, default=240)
    made.add_argument("--limit-s", type=float, default=540, help="for the servers; judging comes after it")
    made.add_argument("--tp", type=int, default=1, help="GPUs that share the model: 1 or 2")
    made.add_argument("--limit", type=float, default=0.1, help="largest float32 regret, in logits")
    made.add_argument("--make-only", action="store_true", help="only make the models, and say what the target does")
    made.add_argument("passed", nargs="*", help="after --: options for every server")
    made.add_argument("--only", default=",".join(known), help="servers by name; plain is what the others are held to")
    options = made.parse_args()
    only = options.only.split(",")
    if not {*only} <= {*known}:
        made.error(f"--only {options.only}: choose from {', '.join(known)}")
    folder = options.out.with_name(f"{options.out.stem}-files").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "target"
    make_target(target)
    for kind in SERVERS:
        make_drafter(folder / kind, right=kind == "right")
    if options.make_only:
        print(look(target))
        return
    words = ["--context-length", "1024", "--mem-fraction-static", "0.5", "--max-total-tokens", "16384"]
    words += ["--max-running-requests", "8", "--cuda-graph-max-bs-decode", "4", "--sampling-backend", "pytorch"]
    words += ["--cuda-graph-backend-prefill", "disabled", "--attention-backend", "triton", "--dtype", "float16"]
    words += [
        "--max-mamba-cache-size",
        "32",
        "--mamba-track-interval",
        "64",
        *options.passed,
    ]
    report: dict[str, Any] = machine() | {"servers": {}}
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float16"
    report["SGLANG_MAMBA_CONV_DTYPE"] = "float16"
    environment: dict[str, str] = {}
    if options.tp > 1:
        report["nccl"], environment, report["nccl_ways"] = peers.way(options.tp)
        if report["nccl"] is None:
            sys.exit(f"NCCL does not work between {options.tp} GPUs here: {report['nccl_ways']}")
    asked = prompts(options.prompts)
    report["asked"] = [f"{name} {kind}" for kind, names in SERVERS.items() for name in names if name in only]
    end = time.monotonic() + options.limit_s
    for kind, every in SERVERS.items():
        names = [name for name in every if name in only]
        logs = folder / f"logs-{kind}"
        logs.mkdir(exist_ok=True)
        drafter = str(folder / kind)
        settings = Settings(str(target), drafter, logs, words, options.tp, environment=environment, end=end)
        for some in [names] if options.tp == 1 else [[name] for name in names]:
            try:
                serve(some, settings, kind, asked, report, options)
            except Ended:
                print(f"the time is over (--limit-s {options.limit_s}): {some} {kind} left out", flush=True)
    sys.exit(conclude(report, target, asked, options))


def serve(
    names: Sequence[str],
    settings: Settings,
    kind: str,
    asked: Sequence[list[int]],
    report: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Start some servers, ask them one at a time, and end them; into the report. Raises Ended."""
    settings.left(1)
    servers = bring_up(names, settings, options.start_s, options.start_s)
    try:
        for server in servers:
            found = each([server], lambda server: ask(server, asked, options.max_tokens)).get(server.name)
            report["servers"][f"{server.name} {kind}"] = found or {"problem": server.problem}
            print(server.name, kind, found["tokens_a_round"] if found else server.problem, flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        for server in servers:
            server.stop()


def conclude(report: dict[str, Any], target: Path, asked: Sequence[list[int]], options: argparse.Namespace) -> bool:
    """Regrets of everything that was said; whether any is too large, or a server did not answer."""
    judged: dict[str, judge.Pairs] = {}
    for name, found in report["servers"].items():
        if "ids" in found:
            judged[name] = list(zip(asked, found["ids"], strict=True))
            starts = [[*ids, *a[:40]] for ids, a in zip(asked, found["ids"], strict=True)]
            judged[f"{name}, again"] = list(zip(starts, found["again"], strict=True))
    report["float32_regret"] = {}
    for name, regret in judge.regrets(str(target), judged, "cuda" if torch.cuda.is_available() else "cpu"):
        report["float32_regret"][name] = regret
        print(name, regret, flush=True)
    problems = verdict(report, options.limit)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("ok" if report["ok"] else f"NOT OK: {problems}")
    return not report["ok"]


def verdict(report: dict[str, Any], limit: float) -> list[str]:
    """What is not as it should be; also, into the report, whose answers are plain decoding's.

    Args:
        report: `asked`, `servers` and `float32_regret`, as they are written.
        limit: logits. A regret may be as large, or as large as plain decoding's own over the same prompts.
    """
    servers, regrets = report["servers"], report["float32_regret"]
    problems = [f"{name}: {found['problem']}" for name, found in servers.items() if "ids" not in found]
    problems += [f"{name}: missing" for name in report["asked"] if name not in servers]
    plain = servers.get("plain right", {})
    for name, found in servers.items():
        if "ids" in found and "ids" in plain:
            for key in ("ids", "again"):
                same = sum(a == b for a, b in zip(found[key], plain[key], strict=True))
                report.setdefault("same_as_plain", {}).setdefault(name, {})[key] = f"{same} of {len(plain[key])}"
    for name, regret in regrets.items():
        mode, part = name.partition(" ")[0], ", again" if name.endswith(", again") else ""
        own = [f"plain right{part}"] + [name.replace("linear", "dflash")] * (mode == "linear")
        most = max([limit, *(regrets[one]["largest"] for one in own if one in regrets)])
        if mode not in ("plain", "dflash") and regret["largest"] > most:  # those two are SGLang's own, and told
            problems.append(f"{name}: regret {regret['largest']}, at most {most}")
    report["ok"], report["problems"] = not problems, problems
    return problems


def look(target: Path) -> dict[str, Any]:
    """What the target says by itself, in float32."""
    model = Qwen3NextForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    told = []
    for ids in prompts(3):
        out = model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False, pad_token_id=0)
        told.append(out[0, len(ids) :].tolist())
    return {"said": told}


if __name__ == "__main__":
    main()
