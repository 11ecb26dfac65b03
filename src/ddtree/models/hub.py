"""A hub id to a local folder, through huggingface_hub: its cache, its token and its offline switch are honoured."""

from pathlib import Path

from ddtree.config import PAIRWISE
from ddtree.errors import DDTreeError, DownloadFailed, ModelNotFound
from ddtree.models.wording import brief

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", PAIRWISE)
UNWANTED = ("*/*", "consolidated*")  # folders with other formats; the same weights a second time


def download(repo_id: str, param: str) -> Path:
    """The local snapshot of a hub repository (config, safetensors, tokenizer), downloaded when it is not there.

    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count as everywhere. Raises ModelNotFound (no such repository, or gated) or
    DownloadFailed (hub not reached, download broken off). `param` is the option that the name was given in.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)))
    except Exception as error:  # the hub's transport, and so its errors, differ between releases: told apart below
        raise explain(error, repo_id, param) from error


def explain(error: Exception, repo_id: str, param: str) -> DDTreeError:
    """The error of a hub call as one that names the repository and the remedy."""
    from huggingface_hub import errors

    repo_id = brief(repo_id)
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(
            f"the hub repository {repo_id} is gated: ask for access on its page, then set HF_TOKEN", param=param
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)):
        return ModelNotFound(
            f"there is no {param} called {repo_id}: neither a local folder nor a public hub repository. "
            "Check the spelling; for a private repository set HF_TOKEN",
            param=param,
        )
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return DownloadFailed(
            f"the hub repository {repo_id} is not in the local cache, and the hub could not be reached. "
            "Check the network and HF_HUB_OFFLINE, or give a local folder",
            param=param,
        )
    reason = brief((str(error).strip() or type(error).__name__).splitlines()[0], 300)
    return DownloadFailed(
        f"the hub repository {repo_id} could not be downloaded ({reason}). "
        "Run the command again: what has arrived is kept",
        param=param,
    )
