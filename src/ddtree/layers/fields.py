"""A model folder's JSON files, and their fields read with explicit types."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree.errors import DamagedFile, ModelNotFound, UnsupportedModel


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON object of a model folder. Raises ModelNotFound or DamagedFile, naming the file."""
    path = folder / name
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist: name a folder in Hugging Face format")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(raw, dict):
        raise DamagedFile(f"{path} must hold a JSON object: fetch it again")
    return raw


class Fields:
    """Typed access to one configuration; null counts as absent. Every error names the field and its value."""

    def __init__(self, raw: Mapping[str, Any], of: str) -> None:
        """of: whose configuration it is, for the messages."""
        self.raw, self.of = raw, of

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; without a default it must be there."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(name, default)
        if value < 1:
            raise self._wrong(name, value, "at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; without a default it must be there."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise self._wrong(name, value, "above 0")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return tuple(value)

    def flag(self, name: str) -> bool:
        """True or false; false when absent."""
        value = self._get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def only(self, name: str, supported: Any) -> None:
        """Refuse every value but one (and absence)."""
        if self.has(name) and self.raw[name] != supported:
            remedy = "use a model without it" if supported is None else f"only {supported!r} is"
            raise UnsupportedModel(f"{name} {self.raw[name]!r} of {self.of} is not supported: {remedy}", param=name)

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads (a divisor of them) and the head size."""
        heads = self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
        head_dim = self.size("head_dim", max(self.size("hidden_size") // heads, 1))
        if head_dim % 2:
            raise self._wrong("head_dim", head_dim, "even, for rotary positions")
        return heads, kv_heads, head_dim

    def rope(self) -> tuple[float, Mapping[str, Any]]:
        """Theta and scaling, wherever a file has them: rope_parameters, or rope_theta and rope_scaling."""
        nested = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(nested, Mapping):
            raise self._wrong("rope_parameters", nested, "an object")
        both = Fields({"rope_theta": self.raw.get("rope_theta"), **nested}, self.of)
        return both.positive("rope_theta", 10000.0), nested

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None and default is None:
            raise DamagedFile(f"config.json of {self.of} has no {name!r}: fetch it again", param=name)
        return default if value is None else value

    def _wrong(self, name: str, value: Any, wanted: str) -> DamagedFile:
        return DamagedFile(f"{name} of {self.of} must be {wanted}, not {value!r}: fetch config.json again", param=name)
