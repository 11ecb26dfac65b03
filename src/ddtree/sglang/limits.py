"""What a loaded target and a started process must be like for trees, refused by name where they are not."""

from ddtree.errors import InvalidOption, UnsupportedModel
from ddtree.sglang.options import HELP, variable


def check_rows(rows: int, settled: int) -> None:
    """Raises InvalidOption where this process's options make other rows than the server's arguments were settled for.

    Args:
        rows: of one request, by the options that this process reads.
        settled: the same, by the process that settled the arguments, and all memory, for them.
    """
    if rows != settled:
        names = ", ".join(map(variable, HELP))
        raise InvalidOption(
            f"DDTREE's options make {rows} rows a request in this process, but the server was settled for {settled}: "
            f"they travel by the environment ({names}), so set those where SGLang's processes start (with Ray, in its "
            "runtime environment)"
        )


def check_latent(backend: str, latent: bool) -> None:
    """Raises InvalidOption where a tree's mask would not be read.

    SGLang's flashinfer has two backends: the one for latent attention (MLA) takes no mask, and verifies any rows as a
    chain.

    Args:
        backend: of verify forwards.
        latent: the target's attention is latent (DeepSeek, Kimi, GLM).
    """
    if latent and backend == "flashinfer":
        raise InvalidOption(
            "SGLang's flashinfer reads no tree's mask for a target with latent attention (MLA): add "
            "--attention-backend triton, or --speculative-ddtree-mode linear"
        )


def check_window(window: int | None, context: int, rows: int) -> None:
    """Raises UnsupportedModel for a sliding window that a tree's rows would be given wrongly.

    SGLang's attention cuts a window off by a row's index, as if row 20 lay 20 tokens behind the root, whatever its
    depth (triton), or lays the mask of whole contexts over windows (flashinfer).

    Args:
        window: tokens that the target's windowed layers see; None or less than 1: there is none.
        context: the longest context.
        rows: of one request.
    """
    if window is None or window < 1 or window >= context + rows:
        return
    short = f", or --context-length {window - rows} or less" if window > rows else ""
    raise UnsupportedModel(
        f"this target has layers with a sliding window of {window} tokens, which SGLang's attention cuts off by a "
        f"row's index, not by its depth in a tree: add --speculative-ddtree-mode linear{short}"
    )
