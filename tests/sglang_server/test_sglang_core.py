"""The shortest proof that the plug-in works inside SGLang: plain decoding's own tokens, from a tree that graphs end.

`make test-sglang-core` runs it, in minutes; test_sglang_modes.py asks the same and much more, of every mode.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from servers import PROMPTS, SAMPLED, TOKENS, Server, serve
from tiny import BLOCK, make_drafter, make_target

Said = dict[str, list[list[int]]]


def ask(server: Server) -> tuple[Said, list[Any]]:
    """Alone, all at once, behind a prefix that a tree wrote, and sampled; and the answers that were given alone."""
    alone = [server.generate(ids) for ids in PROMPTS]
    said = {"alone": [answer["output_ids"] for answer in alone]}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        said["together"] = [answer["output_ids"] for answer in pool.map(server.generate, PROMPTS)]
    half = TOKENS // 2
    said["continued"] = [server.generate(PROMPTS[0] + said["alone"][0][:half], half)["output_ids"]]
    said["sampled"] = [server.generate(PROMPTS[1], **SAMPLED)["output_ids"]]
    return said, alone


def test_a_tree_says_what_plain_decoding_says(tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter")
    with serve(tmp_path, "plain", []) as server:
        plain, _ = ask(server)
    known = [ids + said for ids, said in zip(PROMPTS, plain["alone"], strict=True)] + [PROMPTS[1] + plain["sampled"][0]]
    (tmp_path / "script.json").write_text(json.dumps(known))
    arguments = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(tmp_path / "drafter")]
    arguments += ["--speculative-num-draft-tokens", str(BLOCK), "--speculative-ddtree-budget", "7"]
    with serve(tmp_path, "tree", arguments, graphs=True) as server:
        tree, alone = ask(server)
    assert tree == plain
    assert plain["sampled"] != plain["alone"][1:2]
    assert all(answer["meta_info"]["spec_accept_length"] > 1.5 for answer in alone)
