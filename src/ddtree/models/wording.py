"""How values that a user or a file gave are shown in messages."""

LONGEST = 80  # characters of a value in a message


def brief(text: str, limit: int = LONGEST) -> str:
    """`text` where it is at most `limit` characters long, else its beginning and an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
