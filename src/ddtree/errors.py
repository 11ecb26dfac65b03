"""Errors that a user can cause, and mend. Each message names the value at fault and the remedy."""


class DDTreeError(Exception):
    """Base of every error that is the caller's to mend: shown without a traceback, exit code 1, HTTP 400."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the option or request field at fault
        self.code = code  # a machine-readable word, as OpenAI's API uses them


class InvalidOption(DDTreeError):
    """An option or request field has a value that cannot be used."""


class ModelNotFound(DDTreeError):
    """A model name stands for no folder, file or reachable repository."""


class DownloadFailed(DDTreeError):
    """A registry or hub could not be reached, or sent something else than was asked for."""


class DamagedFile(DDTreeError):
    """A model file exists but cannot be read as what it should be."""


class UnsupportedModel(DDTreeError):
    """A model file is sound, but something in its configuration is not implemented here."""


class DrafterMismatch(DDTreeError):
    """A drafter was made for another target."""


class ContextLengthExceeded(DDTreeError):
    """A prompt, or prompt and answer together, do not fit the context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class PortInUse(DDTreeError):
    """The address to listen on is taken."""
