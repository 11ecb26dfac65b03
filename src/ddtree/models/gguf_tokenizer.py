"""The tokenizer of a GGUF file as tokenizer.json and its companions.

Written with the `tokenizers` library rather than through transformers' own GGUF reader. That reader knows no
pre-tokenizer called `smollm` and falls back to GPT-2's, which gives other tokens wherever blanks stand before a digit
("x =  12"); its releases before 5.18 swap the first and the last special token of such files as well.
"""

import json
from typing import TYPE_CHECKING, Any

from ddtree.models.gguf_file import GGUF
from ddtree.models.wording import brief

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF format
BLANK = "\u2581"  # how a sentencepiece vocabulary spells a space
LLAMA3_PRE = ("llama-bpe", "llama3", "llama-v3")
# How Llama 3 and Qwen 2 cut a text into words: contractions, letters, digits ({digits} at once), signs, blanks.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(file: GGUF) -> dict[str, str]:
    """Name -> text of tokenizer.json, tokenizer_config.json and, where there is one, the chat template.

    Writes nothing. Raises UnsupportedModel or DamagedFile, and what comes of values of other types than they should be.
    """
    model = file.meta.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(file)
    elif model == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise file.refuse(f"the tokenizer {brief(repr(model))}")
    _add_special(tokenizer, file)
    _add_bos(tokenizer, file, default=model == "llama" or file.meta.get("tokenizer.ggml.pre") in LLAMA3_PRE)
    # the class that takes tokenizer.json as it is; the one of the model type would build its own pre-tokenizer
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.need("context_length")),
    }
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = _token(file, key)
        if token is not None:
            config[f"{role}_token"] = token
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n",
    }
    template = file.meta.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise TypeError("tokenizer.chat_template is not a text")
    return files | {"chat_template.jinja": template} if template else files


def _tokens(file: GGUF) -> list[str]:
    """The vocabulary, by id."""
    tokens = file.meta.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise file.lacks("the value tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise TypeError("tokenizer.ggml.tokens is not a list of texts")
    return tokens


def _token(file: GGUF, key: str) -> str | None:
    number = file.meta.get(f"tokenizer.ggml.{key}_token_id")
    tokens = _tokens(file)
    return tokens[number] if number is not None and 0 <= number < len(tokens) else None


def _byte_level(file: GGUF) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models

    pre = file.meta.get("tokenizer.ggml.pre", "gpt-2")
    vocab = {token: number for number, token in enumerate(_tokens(file))}
    merges = [_pair(merge) for merge in file.meta.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in LLAMA3_PRE))
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    first, blank, second = merge.partition(" ")
    if not (first and blank and second):
        raise ValueError(f"the merge {brief(repr(merge))} is not of two tokens")
    return first, second


def _pre_tokenizer(file: GGUF, pre: str) -> Any:
    """How a text is cut before merging. A guess would give wrong tokens silently, so unknown names are refused."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in LLAMA3_PRE or pre == "qwen2":
        words = WORDS.format(digits=r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}")
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise file.refuse(f"the pre-tokenizer {brief(repr(pre))}")


def _sentencepiece(file: GGUF) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = _tokens(file)
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, file.meta.get("tokenizer.ggml.scores") or [0.0] * len(tokens))
    unknown = _token(file, "unknown")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blanks: list[Any] = [normalizers.Replace(" ", BLANK)]
    steps: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.meta.get("tokenizer.ggml.add_space_prefix", True):
        blanks.insert(0, normalizers.Prepend(BLANK))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(blanks)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """A sentencepiece vocabulary states no merges: each way to split a piece is one, best score of the whole first."""
    merges = [
        (piece[:cut], piece[cut:])
        for piece in vocab
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return sorted(merges, key=lambda pair: (-scores[vocab["".join(pair)]], vocab[pair[0]], vocab[pair[1]]))


def _add_special(tokenizer: "Tokenizer", file: GGUF) -> None:
    from tokenizers import AddedToken

    kinds = file.meta.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(_tokens(file), kinds, strict=False):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _add_bos(tokenizer: "Tokenizer", file: GGUF, *, default: bool) -> None:
    from tokenizers import processors

    bos = _token(file, "bos")
    if bos is not None and file.meta.get("tokenizer.ggml.add_bos_token", default):
        number = file.meta["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, number)]
        )
