"""SGLang and transformers import torchvision for pictures alone, and no build of it fits this torch on a CPU.

Every name of it exists here and can do nothing.
"""

import sys
from types import ModuleType
from typing import Any, ClassVar

__version__ = "0.0.0"


class _AnyMember(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Nothing(ModuleType):
    """A module, class or function of any name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyMember(name, (), {})


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "tv_tensors"):
    sys.modules[f"torchvision.{_name}"] = _Nothing(f"torchvision.{_name}")
io = sys.modules["torchvision.io"]
transforms = sys.modules["torchvision.transforms"]
