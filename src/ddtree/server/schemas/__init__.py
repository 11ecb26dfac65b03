"""Request bodies: what is read, what is refused by name, and what an engine is asked for in the end."""

from ddtree.server.schemas.chat import NEUTRAL_CHAT, ChatRequest
from ddtree.server.schemas.common import MAX_CHOICES, CompletionFields
from ddtree.server.schemas.completion import NEUTRAL_COMPLETION, CompletionRequest
from ddtree.server.schemas.messages import NEUTRAL_MESSAGE, Message

__all__ = [
    "MAX_CHOICES",
    "NEUTRAL_CHAT",
    "NEUTRAL_COMPLETION",
    "NEUTRAL_MESSAGE",
    "ChatRequest",
    "CompletionFields",
    "CompletionRequest",
    "Message",
]
