"""What breaks installations of SGLang, row by row of the table that the rules were made from."""

from dataclasses import replace

from ddtree.doctor import Facts
from ddtree.doctor.facts import Driver, Import, Kernel, Requirement
from faults import LOST, Fault, lost
from machines import (
    SERVER,
    failing,
    gpu,
    sglang,
    with_card,
    with_environment,
    with_model,
    with_packages,
    with_system,
    with_torch,
    with_xid,
)

ABI = (
    "ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops library!\nError details:\n"
    "- ImportError: /venv/sgl_kernel/sm90/common_ops.abi3.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKciib"
)
OPS = (
    "ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops library!\nError details:\n"
    "- ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"
)
GDN = {"linear_attention": True, "model_type": "qwen3_next"}
QWEN = "ValueError: 'qwen3_asr' is already used by a Transformers config"
TVM = "AttributeError: module 'tvm_ffi' has no attribute 'core'"
CUBIN = "RuntimeError: flashinfer-cubin version (0.6.12) does not match flashinfer version (0.6.15.post1)"
CODEC = "RuntimeError: Could not load libtorchcodec. Likely causes: FFmpeg is not properly installed"
SNDFILE = "OSError: sndfile library not found using ctypes.util.find_library"
NVRTC = "ImportError: libnvrtc.so.13: cannot open shared object file: No such file"


def unknown_sglang(facts: Facts, xgrammar: str) -> Facts:
    """A release that the table lacks, with the pins that it declares."""
    pins = {"torch": "2.9.1", "xgrammar": "0.1.32", "transformers": "4.57.1", "flashinfer-python": "0.6.3"}
    installed = {**pins, "xgrammar": xgrammar}
    old = with_packages(
        facts, sglang="0.5.9", sglang_kernel=None, sgl_kernel="0.3.21", apache_tvm_ffi="0.1.9",
        flashinfer_cubin="0.6.3",
        **{name.replace("-", "_"): version for name, version in installed.items()},
    )  # fmt: skip
    asks = tuple(Requirement("sglang", name, f"=={pins[name]}", installed[name]) for name in pins)
    return replace(old, requirements=asks, kernel=Kernel("0.3.21", "13"))


FAULTS = [
    # The table of what breaks installations of SGLang, row by row.
    Fault(
        "kernel-abi",
        lambda: with_packages(
            failing(with_torch(sglang(), version="2.12.0+cu130"), "sgl_kernel", ABI, of_it=(SERVER,)),
            torch="2.12.0+cu130",
        ),
        sglang,
        says=("2.12.0+cu130", "0.4.5", '"torch==2.11.0" "sglang-kernel==0.4.5"'),
    ),
    Fault(
        "kernel-common-ops",
        lambda: failing(sglang(), "sgl_kernel", OPS, of_it=(SERVER,)),
        sglang,
        says=("libcudart.so.12", "pip install"),
    ),
    Fault(
        "kernel-cuda",
        lambda: failing(with_torch(sglang(), version="2.11.0+cu128", cuda="12.8"), "sgl_kernel", OPS, of_it=(SERVER,)),
        lambda: replace(with_torch(sglang(), version="2.11.0+cu128", cuda="12.8"), kernel=Kernel("0.4.5+cu129", "12")),
        says=("CUDA 13", "CUDA 12.8"),
    ),
    Fault(
        "transformers-range",
        lambda: failing(with_packages(sglang(), transformers="5.17.0"), SERVER, QWEN),
        sglang,
        says=("5.17.0", "5.12.1"),
    ),
    Fault(
        "transformers-range",
        lambda: with_packages(sglang(), transformers="4.57.1"),
        lambda: sglang(version="0.5.13.post1"),
    ),
    Fault(
        "transformers-old",
        lambda: with_packages(sglang(version="0.5.23"), transformers="4.57.1"),
        lambda: sglang(version="0.5.23"),
    ),
    Fault(
        "tvm-ffi",
        lambda: failing(with_packages(sglang(), apache_tvm_ffi="0.1.13"), "xgrammar", TVM, of_it=(SERVER,)),
        sglang,
        says=("0.1.13", "0.1.11"),
    ),
    Fault(
        "tvm-ffi",
        lambda: failing(
            sglang(), "xgrammar", "Fatal Python error: Segmentation fault", of_it=(SERVER,), signal="SIGSEGV"
        ),
        sglang,
        says=("SIGSEGV", "--grammar-backend none"),
    ),
    Fault(
        "xgrammar-old",
        lambda: unknown_sglang(sglang(), "0.1.10"),
        lambda: unknown_sglang(sglang(), "0.1.32"),
        says=("0.1.10", "0.1.32"),
        also=("set-unknown",),
        neighbour=("set-unknown",),
    ),
    Fault("xgrammar-old", lambda: with_packages(sglang(), xgrammar="0.1.10"), sglang),
    Fault(
        "gdn-blackwell",
        lambda: with_model(sglang("10.0", attention_backend="flashinfer"), **GDN),
        lambda: with_model(sglang("10.0", attention_backend="triton"), **GDN),
        says=("flashinfer", "--attention-backend triton"),
    ),
    Fault(
        "gdn-blackwell",
        lambda: with_model(sglang("10.3", attention_backend="fa3"), **GDN),
        lambda: sglang("10.3", attention_backend="flashinfer"),
    ),
    Fault(
        "gdn-blackwell-default",
        lambda: with_model(sglang("10.0"), **GDN),
        lambda: with_model(sglang("9.0"), **GDN),
        "warn",
    ),
    Fault(
        "gdn-rtx",
        lambda: with_model(sglang("12.0", attention_backend="flashinfer"), **GDN),
        lambda: sglang("12.0", attention_backend="flashinfer"),
        "warn",
    ),
    Fault(
        "trtllm-card",
        lambda: sglang("12.0", attention_backend="trtllm_mha"),
        lambda: sglang("10.0", attention_backend="trtllm_mha"),
        says=("10.0 and 10.3", "12.0"),
    ),
    Fault(
        "fa3-blackwell", lambda: sglang("10.0", attention_backend="fa3"), lambda: sglang("9.0", attention_backend="fa3")
    ),
    Fault(
        "flashinfer-toolkit",
        lambda: with_system(sglang("12.0"), nvcc="12.8"),
        lambda: sglang("12.0"),
        says=("12.9", "sm75"),
    ),
    Fault(
        "flashinfer-toolkit",
        lambda: with_system(sglang("12.0"), nvcc="12.4"),
        lambda: with_system(sglang("12.0", attention_backend="triton"), nvcc="12.4"),
    ),
    Fault(
        "flashinfer-sm75",
        lambda: failing(
            sglang("12.0"), "flashinfer", "RuntimeError: FlashInfer requires sm75 or higher", of_it=(SERVER,)
        ),
        lambda: sglang("12.0"),
    ),
    Fault(
        "flashinfer-cubin",
        lambda: failing(with_packages(sglang(), flashinfer_cubin="0.6.12"), "flashinfer", CUBIN, of_it=(SERVER,)),
        lambda: with_packages(sglang(), flashinfer_cubin=None),
        says=("0.6.12", "0.6.15.post1"),
    ),
    Fault(
        "flashinfer-jit-cache",
        lambda: with_packages(sglang(), flashinfer_jit_cache="0.6.12+cu130"),
        lambda: with_packages(sglang(), flashinfer_jit_cache="0.6.15.post1+cu130"),
    ),
    Fault(
        "torchcodec",
        lambda: failing(with_packages(sglang(), torchcodec="0.8.0"), "torchcodec", CODEC, of_it=(SERVER,)),
        lambda: with_packages(sglang(), torchcodec=None),
        says=("pip uninstall torchcodec",),
    ),
    Fault(
        "torchcodec-idle",
        lambda: failing(with_packages(sglang(), torchcodec="0.8.0"), "torchcodec", NVRTC),
        lambda: replace(
            with_packages(sglang(), torchcodec="0.8.0"), imports=(*sglang().imports, Import("torchcodec", True))
        ),
        "warn",
    ),
    Fault(
        "soundfile-missing",
        lambda: failing(
            with_packages(sglang(), soundfile=None), SERVER, "ModuleNotFoundError: No module named 'soundfile'"
        ),
        lambda: with_packages(sglang(), soundfile=None),
        says=("pip install soundfile",),
    ),
    Fault(
        "soundfile-library",
        lambda: failing(sglang(), "soundfile", SNDFILE, of_it=(SERVER,)),
        sglang,
        says=("libsndfile1",),
    ),
    Fault("greedy-only", lambda: sglang("8.6"), lambda: replace(sglang("8.6"), drafter=None), "warn", says=("greedy",)),
    Fault(
        "long-mask",
        lambda: with_model(sglang(), max_position_embeddings=131072),
        sglang,
        "warn",
        says=("--context-length",),
        also=("drafter-short",),
    ),
    Fault(
        "gpu-lost",
        lambda: lost(gpu(count=8)),
        lambda: gpu(count=8),
        says=("GPU 3", "00000000:13:00.0", "Xid 79", "CUDA_VISIBLE_DEVICES=0,1,2,4,5,6,7"),
    ),
    Fault("gpu-lost", lambda: lost(sglang(count=8)), lambda: sglang(count=8)),
    Fault(
        "gpu-lost-elsewhere",
        lambda: with_environment(with_xid(with_card(gpu(count=8), 3, **LOST), 79, 3), CUDA_VISIBLE_DEVICES="0,1,2"),
        lambda: with_environment(gpu(count=8), CUDA_VISIBLE_DEVICES="0,1,2"),
        "warn",
    ),
    # SGLang.
    Fault("sglang-missing", lambda: replace(gpu(), asked=sglang().asked), sglang, says=("/venv/bin/python",)),
    Fault(
        "sglang-no-wheel",
        lambda: with_system(replace(gpu(), asked=sglang().asked), python="3.14.0"),
        lambda: with_system(sglang(), python="3.14.0"),
        also=("sglang-missing",),
    ),
    Fault(
        "no-cards",
        lambda: replace(
            sglang(), gpus=(), driver=Driver("missing"), torch=replace(sglang().torch, devices=(), available=False)
        ),
        sglang,
    ),  # type: ignore[type-var]
    Fault(
        "set-torch",
        lambda: failing(
            with_packages(with_torch(sglang(), version="2.13.0+cu130"), torch="2.13.0+cu130"),
            "sgl_kernel",
            "ImportError: wrong",
            of_it=(SERVER,),
        ),
        sglang,
        says=("2.13.0+cu130", "2.11.0"),
        also=("import-failed",),
    ),
    Fault("set-older", lambda: with_packages(sglang(), sglang_kernel="0.4.4"), sglang, says=("0.4.4", "0.4.5")),
    Fault(
        "set-mismatch",
        lambda: with_packages(with_torch(sglang(), version="2.13.0+cu130"), torch="2.13.0+cu130"),
        sglang,
        "warn",
    ),
    Fault("set-unknown", lambda: with_packages(sglang(), sglang="0.5.99"), sglang, "warn", says=("--rules",)),
    Fault(
        "attention-unknown",
        lambda: sglang(attention_backend="nonsense"),
        lambda: sglang(attention_backend="fa3"),
        "unknown",
        says=("--attention-backend nonsense",),
    ),
    Fault(
        "grammar-unknown",
        lambda: sglang(grammar_backend="nonsense"),
        lambda: sglang(grammar_backend="llguidance"),
        "unknown",
        says=("--grammar-backend nonsense",),
    ),
]
