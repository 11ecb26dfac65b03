"""What a target and a process must be like for trees."""

import pytest

from ddtree.errors import InvalidOption, UnsupportedModel
from ddtree.sglang.limits import check_latent, check_rows, check_window


def test_rows_are_those_that_the_server_was_settled_for() -> None:
    check_rows(32, 32)
    with pytest.raises(InvalidOption, match=r"make 32 .* settled for 16: .*DDTREE_SGLANG_MODE, DDTREE_SGLANG_BUDGET"):
        check_rows(32, 16)


def test_flashinfer_reads_no_mask_for_latent_attention() -> None:
    check_latent("flashinfer", latent=False)
    check_latent("triton", latent=True)
    with pytest.raises(InvalidOption, match=r"latent attention .* add --attention-backend triton"):
        check_latent("flashinfer", latent=True)


@pytest.mark.parametrize("window", [None, -2, -1, 0, 2080])
def test_windows_that_no_row_feels(window: int | None) -> None:
    check_window(window, context=2048, rows=32)


@pytest.mark.parametrize(("window", "remedy"), [(2079, "--context-length 2047 or less"), (127, "95 or less")])
def test_windows_are_refused(window: int, remedy: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"a sliding window of {window} tokens.* linear, or .*{remedy}"):
        check_window(window, context=2048, rows=32)


def test_no_context_is_named_that_cannot_be() -> None:
    with pytest.raises(UnsupportedModel, match=r"add --speculative-ddtree-mode linear$"):
        check_window(20, context=2048, rows=32)
