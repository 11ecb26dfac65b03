"""What the parts of one HTTP request share: its id, and what the access log will say of it."""

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

# What is echoed in a header and written into logs: printable ASCII without spaces, of bounded length.
REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclass
class RequestNote:
    """One HTTP request, as logs know it. The engine's thread adds the tokens."""

    request_id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


current: ContextVar[RequestNote | None] = ContextVar("ddtree_request", default=None)


def request_id() -> str:
    """The id of the HTTP request that this code runs for; "-" outside of one."""
    note = current.get()
    return "-" if note is None else note.request_id


def choose_request_id(sent: str | None) -> str:
    """The client's own id where it is fit to be repeated, else a fresh one."""
    return sent if sent is not None and REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
