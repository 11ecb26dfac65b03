"""The program of the child processes. It alone imports what may crash, and answers with one JSON object.

python -m ddtree.doctor.child torch
python -m ddtree.doctor.child import MODULE
python -m ddtree.doctor.child libraries SONAME ...
python -m ddtree.doctor.child models MODEL DRAFTER ENGINE
"""

import faulthandler
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

LONGEST = 4000  # characters of an error


def main(arguments: list[str]) -> None:
    """Do what the arguments say, and write the answer to what was standard output when the program began."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # packages that print while they are imported do not spoil the answer
    faulthandler.enable()
    work: dict[str, Callable[..., Any]] = {
        "torch": _torch,
        "import": _import,
        "libraries": _libraries,
        "models": _models,
    }
    try:
        said: dict[str, Any] = {"value": work[arguments[0]](*arguments[1:])}
    except BaseException as error:  # SystemExit and C++ errors too: every way to fail is an answer here
        text = f"{type(error).__name__}: {error}"
        said = {"error": text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"}
    json.dump(said, answer)
    answer.close()
    os._exit(0)  # without unloading: a crash at the very end would hide the answer


def _torch() -> dict[str, Any]:
    import torch

    devices: list[Any] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        why = " ".join(str(said[0].message).split()) if said else None
        try:
            if available:
                devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        except Exception as error:  # of many kinds: a card that does not answer shows here
            available, why = False, f"{type(error).__name__}: {error}"
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")  # get_arch_list is empty where no card can be used
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": torch.cuda.get_arch_list() or (flags() or "").split(),
        "available": available,
        "devices": [
            {"name": d.name, "capability": f"{d.major}.{d.minor}", "memory_mib": d.total_memory >> 20} for d in devices
        ],
        "said": why[:LONGEST] if why else None,
    }


def _import(module: str) -> bool:
    importlib.import_module(module)
    return True


def _libraries(*names: str) -> dict[str, bool]:
    import ctypes

    found = {}
    for name in names:
        try:
            ctypes.CDLL(name)
            found[name] = True
        except OSError:
            found[name] = False
    return found


def _models(model: str, drafter: str, engine: str = "embedded") -> dict[str, Any]:
    from ddtree.doctor.checkpoints import look

    return look(model, drafter, engine)


if __name__ == "__main__":
    main(sys.argv[1:])
