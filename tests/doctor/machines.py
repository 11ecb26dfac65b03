"""Made-up machines: healthy ones, and the means to break them in one place."""

from dataclasses import replace
from typing import Any

from ddtree.doctor.facts import (
    Asked,
    Checkpoint,
    Context,
    Device,
    Driver,
    Facts,
    Gpu,
    Import,
    Kernel,
    Port,
    Process,
    Requirement,
    Space,
    System,
    Torch,
    Xid,
)

SERVER = "sglang.srt.entrypoints.http_server"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
NAMES = {"8.0": "NVIDIA A100", "8.6": "NVIDIA A10", "8.9": "NVIDIA L4", "9.0": "NVIDIA H200", "10.0": "NVIDIA B200",
         "10.3": "NVIDIA B300", "12.0": "NVIDIA GeForce RTX 5090"}  # fmt: skip
SYSTEM = System(
    python="3.12.3", executable="/venv/bin/python", platform="Linux", machine="x86_64", glibc="2.39", cores=16,
    memory_mib=128_000, shm_mib=64_000, compiler="/usr/bin/gcc", python_header=True, nvcc="13.0",
    ephemeral=(32768, 60999), spaces=(Space("models of ddtree", "/home/me/.cache/ddtree", 60_000),),
    memory_total_mib=131_072,
)  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
         "num_hidden_layers": 30, "max_position_embeddings": 8192, "tie_word_embeddings": True,
         "linear_attention": False, "quantisation": None}  # fmt: skip
MODEL = Checkpoint("smollm2-135m", "here", "/models/smollm2", None, 257, LLAMA, context=Context(30, 3, 64, 8192))
DRAFTER = Checkpoint(
    "auto", "here", "/models/drafter", None, 31,
    {"architectures": ["DFlashDraftModel"], "max_position_embeddings": 8192}, context=Context(1, 3, 64, 8192, 16),
)  # fmt: skip
SETS = {  # sglang -> torch, kernels, flashinfer, xgrammar, transformers
    "0.5.13.post1": ("2.11.0", "0.4.3", "0.6.12", "0.2.1", "5.8.1"),
    "0.5.17": ("2.11.0", "0.4.5", "0.6.15.post1", "0.2.1", "5.12.1"),
    "0.5.20": ("2.13.0", "0.4.7", "0.6.18", "0.2.1", "5.12.1"),
    "0.5.23": ("2.14.1", "0.4.10", "0.7.2", "0.2.7", "5.19.0"),
}
MODULES = ("torch", "transformers", "triton", "sgl_kernel", "flashinfer", "xgrammar", "tvm_ffi", "soundfile", SERVER)


def bus(index: int) -> str:
    return f"00000000:{0x10 + index:02x}:00.0"


def card(index: int = 0, capability: str = "9.0", **changes: Any) -> Gpu:
    """A healthy card."""
    return replace(
        Gpu(index, bus(index), NAMES.get(capability, "NVIDIA Card"), f"GPU-{index:08x}-aaaa", capability,
            143_771, 143_000, 0, False, False, "Default", False),
        **changes,
    )  # fmt: skip


def cpu() -> Facts:
    """No GPU, the embedded engine, a torch for CPUs."""
    return Facts(
        Asked(), SYSTEM, Driver("missing"), Port(30000, True),
        torch=Torch("2.13.0+cpu", None, None, (), False),
        packages={"ddtree": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.24.0"},
        requirements=(Requirement("ddtree", "torch", ">=2.11", "2.13.0+cpu"),),
        imports=(Import("torch", True), Import("ddtree.engine", True)),
        libraries={"libgomp.so.1": True},
        model=MODEL, drafter=DRAFTER,
    )  # fmt: skip


def gpu(capability: str = "9.0", count: int = 1) -> Facts:
    """Cards of one kind, the embedded engine, a torch for CUDA 13."""
    cards = tuple(card(index, capability) for index in range(count))
    return replace(
        cpu(),
        driver=Driver("ok", "580.159.04", "13.0", None, tuple(entry.bus_id or "" for entry in cards), ()),
        gpus=cards,
        torch=Torch("2.11.0+cu130", "13.0", None, ARCHS, True,
                    tuple(Device(entry.name or "", capability, 143_771) for entry in cards)),
        packages={"ddtree": "0.1.0", "torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0"},
    )  # fmt: skip


def sglang(capability: str = "9.0", count: int = 1, version: str = "0.5.17", **asked: Any) -> Facts:
    """Cards of one kind, and a release of SGLang with the set known to work."""
    torch, kernels, flashinfer, xgrammar, transformers = SETS[version]
    base = gpu(capability, count)
    assert base.torch is not None
    packages = {
        "ddtree": "0.1.0", "torch": f"{torch}+cu130", "triton": "3.6.0", "transformers": transformers,
        "tokenizers": "0.22.2", "sglang": version, "sglang-kernel": kernels, "flashinfer-python": flashinfer,
        "flashinfer-cubin": flashinfer, "xgrammar": xgrammar, "apache-tvm-ffi": "0.1.11", "soundfile": "0.13.1",
    }  # fmt: skip
    return replace(
        base,
        asked=Asked(engine="sglang", **asked),
        torch=replace(base.torch, version=f"{torch}+cu130"),
        packages=packages,
        imports=tuple(Import(module, True) for module in MODULES),
        kernel=Kernel(kernels, "13"),
        libraries={"libgomp.so.1": True, "libsndfile.so.1": False, "libnuma.so.1": True},
    )


def failing(facts: Facts, module: str, error: str, *, of_it: tuple[str, ...] = (), signal: str | None = None) -> Facts:
    """An import that fails, and those that fail of it with the same last line."""
    broken = Import(module, False, error, signal)
    known = {entry.module for entry in facts.imports}
    kept = tuple(
        replace(broken, module=entry.module) if entry.module in (module, *of_it) else entry for entry in facts.imports
    )
    return replace(facts, imports=kept if module in known else (*kept[:-1], broken, kept[-1]))


def with_packages(facts: Facts, **versions: str | None) -> Facts:
    """Other versions; underscores stand for hyphens, None takes a distribution away."""
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    merged = {**facts.packages, **changed}
    return replace(facts, packages={name: version for name, version in merged.items() if version is not None})


def with_system(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, system=replace(facts.system, **changes))


def with_environment(facts: Facts, **values: str) -> Facts:
    return with_system(facts, environment={**facts.system.environment, **values})


def with_model(facts: Facts, **config: Any) -> Facts:
    assert facts.model is not None
    return replace(facts, model=replace(facts.model, config={**facts.model.config, **config}))


def with_weights(facts: Facts, mib: int) -> Facts:
    assert facts.model is not None
    return replace(facts, model=replace(facts.model, weights_mib=mib))


def with_asked(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, asked=replace(facts.asked, **changes))


def with_card(facts: Facts, index: int = 0, **changes: Any) -> Facts:
    cards = tuple(replace(entry, **changes) if entry.index == index else entry for entry in facts.gpus)
    return replace(facts, gpus=cards)


def with_xid(facts: Facts, code: int, index: int = 0) -> Facts:
    return replace(facts, driver=replace(facts.driver, xids=(Xid(bus(index), code, "pid=1, name=python3"),)))


def with_torch(facts: Facts, **changes: Any) -> Facts:
    assert facts.torch is not None
    return replace(facts, torch=replace(facts.torch, **changes))


def program(mib: int) -> Process:
    return Process(4711, "python3", mib)
