"""The only part that looks at the machine: everything that was seen becomes `Facts`."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddtree.doctor import children, packages, smi, system
from ddtree.doctor.children import Outcome
from ddtree.doctor.facts import Asked, Checkpoint, Facts, Import, Requirement, Torch
from ddtree.doctor.record import build

SECONDS = 180.0  # for one child: a cold disk takes a minute for the largest packages
WORKERS = 4
KERNELS = ("sglang-kernel", "sgl-kernel")  # the newer and the older name of one distribution
PACKAGES = (
    "ddtree", "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "llguidance",
    "sglang", *KERNELS, "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "xgrammar", "apache-tvm-ffi",
    "soundfile", "torchcodec", "torchvision", "torchaudio",
)  # fmt: skip
EMBEDDED_IMPORTS = ("ddtree.engine",)
# Module -> the distributions that bring it. SGLang's server last: it fails with whatever it needs.
SGLANG_IMPORTS = {
    "transformers": ("transformers",), "triton": ("triton",), "sgl_kernel": KERNELS,
    "flashinfer": ("flashinfer-python",), "xgrammar": ("xgrammar",), "tvm_ffi": ("apache-tvm-ffi",),
    "soundfile": ("soundfile",), "torchcodec": ("torchcodec",), "sglang.srt.entrypoints.http_server": ("sglang",),
}  # fmt: skip

Run = Callable[[Sequence[str], float], Outcome]


def probe(asked: Asked, libraries: Sequence[str], run: Run = children.run) -> Facts:
    """Look at this machine for what `asked` needs. libraries: sonames to try.

    Imports, and all that reads model files, happen in child processes; `run` is exchanged in tests.
    """
    installed = packages.versions(PACKAGES)
    modules = list(EMBEDDED_IMPORTS)
    if asked.engine == "sglang":
        modules = [name for name, of in SGLANG_IMPORTS.items() if any(one in installed for one in of)]
    work: list[list[str]] = [["torch"], ["models", asked.model, asked.loaded_drafter, asked.engine]]
    work += [["import", name] for name in modules]
    if libraries:
        work.append(["libraries", *libraries])
    driver, gpus = smi.look()  # before the children: they would be seen on the cards
    host = system.look()
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        try:
            outcomes = list(pool.map(lambda arguments: run(arguments, SECONDS), work))
        except BaseException:  # Ctrl-C: nobody waits three minutes for children
            pool.shutdown(wait=False, cancel_futures=True)
            children.end_all()
            raise
    by_work = {" ".join(arguments[:2]): outcome for arguments, outcome in zip(work, outcomes, strict=True)}
    torch, reader = outcomes[:2]
    models = reader.value or {}
    imports = [_import("torch", torch), *(_import(name, by_work[f"import {name}"]) for name in modules)]
    if reader.value is None:
        imports.append(_import("ddtree.models", reader))
    return Facts(
        asked=asked,
        system=host,
        driver=driver,
        port=system.look_at_port(asked.port),
        gpus=gpus,
        torch=build(Torch, torch.value) if torch.value else None,
        packages=installed,
        requirements=_requirements(asked.engine),
        imports=tuple(imports),
        kernel=packages.kernel(KERNELS),
        libraries=(outcomes[-1].value or {}) if libraries else {},
        model=_checkpoint(models.get("model")),
        drafter=_checkpoint(models.get("drafter")),
    )


def _requirements(engine: str) -> tuple[Requirement, ...]:
    names = ("ddtree", "sglang") if engine == "sglang" else ("ddtree",)
    return tuple(requirement for name in names for requirement in packages.requirements(name))


def _import(module: str, outcome: Outcome) -> Import:
    return Import(
        module, outcome.value is not None, outcome.error, outcome.signal, outcome.timed_out, round(outcome.seconds, 1)
    )


def _checkpoint(value: Any) -> Checkpoint | None:
    return build(Checkpoint, value) if value else None
