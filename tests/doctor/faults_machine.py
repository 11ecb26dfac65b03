"""Faults of the machine, the models and the environment: those users reported, and those that a start would meet."""

from dataclasses import replace

from ddtree.doctor.facts import Checkpoint, Context, Driver, Facts, Import, Port, Requirement, Space
from faults import Fault
from machines import (
    DRAFTER,
    MODEL,
    SERVER,
    cpu,
    failing,
    gpu,
    program,
    sglang,
    with_asked,
    with_card,
    with_model,
    with_packages,
    with_system,
    with_torch,
    with_weights,
    with_xid,
)

HELD = {"free_mib": 100, "processes": (program(143_000),)}


def llama_8b(facts: Facts, **asked: int) -> Facts:
    """Weights of 15 GiB and 2 GiB, and 128 KiB of the target for each of up to 131,072 positions."""
    model = replace(MODEL, weights_mib=15_317, context=Context(32, 8, 128, 131_072))
    drafter = replace(DRAFTER, weights_mib=2_000, context=Context(5, 8, 128, 40_960, 10))
    return with_asked(replace(facts, model=model, drafter=drafter), **asked)


NVRTC = "ImportError: libnvrtc.so.13: cannot open shared object file: No such file"
QWEN3 = "model_type 'qwen3' is not supported by the embedded engine"
NVML = "Failed to initialize NVML: Driver/library version mismatch"
DRAFTX = "architectures ['X'] is not a drafter that is supported"


def on_cpu(facts: Facts) -> Facts:
    """A build of torch for CPUs: the engine would not touch the cards."""
    return with_torch(facts, version="2.11.0+cpu", cuda=None, available=False)


def closed(facts: Facts) -> Facts:
    """The cache cannot be written."""
    return with_system(facts, spaces=(Space("models of ddtree", "/cache", 60_000, "/cache is not a folder"),))


FAULTS = [
    # The faults of users' reports that show before the start.
    Fault(
        "arch-missing",
        lambda: with_torch(gpu("12.0"), archs=("sm_80", "sm_90", "sm_90a")),
        lambda: with_torch(gpu("12.0"), archs=("sm_80", "compute_90")),
        says=("sm_80, sm_90", "sm_120"),
    ),
    Fault(
        "arch-missing",
        lambda: with_torch(gpu("8.0"), archs=("sm_86", "sm_90")),
        lambda: with_torch(gpu("8.9"), archs=("sm_86", "sm_90")),
    ),
    Fault(
        "import-no-module",
        lambda: failing(sglang(), SERVER, "ModuleNotFoundError: No module named 'interegular'"),
        sglang,
        says=("interegular", "pip install interegular"),
    ),
    Fault(
        "drafter-misfit",
        lambda: replace(gpu(), drafter=replace(DRAFTER, misfit="it has vocab_size 32000, the target's is 49152")),
        gpu,
        says=("32000",),
    ),
    Fault(
        "drafter-short", lambda: with_model(gpu(), max_position_embeddings=32768), gpu, "warn", says=("8192", "32768")
    ),
    Fault(
        "tied-head",
        lambda: replace(
            with_model(sglang(), model_type="gemma4"),
            drafter=replace(DRAFTER, config={"architectures": ["DFlash2DraftModel"]}),
        ),
        lambda: replace(with_model(sglang(), model_type="gemma4"), drafter=DRAFTER),
    ),
    Fault(
        "gpu-too-small",
        lambda: with_weights(gpu(), 150_000),
        lambda: with_weights(gpu(), 140_000),
        says=("146.5 GiB", "140.4 GiB"),
    ),
    Fault(
        "contexts-too-large",
        lambda: llama_8b(gpu()),
        lambda: llama_8b(gpu(), max_model_len=32_768),
        says=(
            "at least 183.5 GiB of the 140.4 GiB on the card",
            "14.96 GiB target weights; 1.95 GiB drafter weights",
            "144.08 GiB target context: 9 slots of 131146 positions",
            "22.51 GiB drafter context",
            "lower --max-running-requests to 5, or --max-model-len to 97139 (or less",
        ),
    ),
    Fault(
        "contexts-too-large",
        lambda: llama_8b(with_card(gpu(), memory_mib=17_450, free_mib=17_440)),
        lambda: llama_8b(
            with_card(gpu(), memory_mib=17_450, free_mib=17_440), max_model_len=256, max_running_requests=1
        ),
        says=("lower --max-running-requests to 1 and --max-model-len to ",),
    ),
    Fault(
        "contexts-crowded",
        lambda: llama_8b(with_card(gpu(), free_mib=50_000, processes=(program(93_000),)), max_model_len=32_768),
        lambda: llama_8b(with_card(gpu(), free_mib=50_000, processes=(program(93_000),)), max_model_len=16_384),
        says=("48.8 GiB free", "python3 (pid 4711", "end what is on it, or lower --max-running-requests to "),
    ),
    Fault(
        "memory-contexts",
        lambda: llama_8b(cpu()),
        lambda: llama_8b(with_system(cpu(), memory_mib=20_000), max_model_len=32_768),
        says=("of the 128.0 GiB of this machine", "lower --max-running-requests to "),
    ),
    Fault(
        "context-too-long",
        lambda: with_asked(cpu(), max_model_len=8193),
        lambda: with_asked(cpu(), max_model_len=8192),
        says=("--max-model-len 8193 is more than", "max_position_embeddings is 8192"),
    ),
    Fault(
        "gpus-too-small", lambda: with_weights(sglang(count=2), 300_000), lambda: with_weights(sglang(count=4), 140_000)
    ),
    Fault(
        "needs-tensor-parallel",
        lambda: with_weights(sglang(count=4), 200_000),
        lambda: with_weights(sglang(count=4), 140_000),
        "warn",
        says=("--tp 4",),
    ),
    # The cards and their driver.
    Fault(
        "driver-broken",
        lambda: replace(gpu(), gpus=(), torch=cpu().torch, driver=Driver("failed", problem=NVML)),
        cpu,
        says=("reboot",),
    ),
    Fault(
        "no-devices",
        lambda: replace(sglang(), gpus=(), driver=Driver("failed", problem="No devices were found")),
        sglang,
    ),
    Fault(
        "no-devices-embedded",
        lambda: replace(cpu(), driver=Driver("failed", problem="No devices were found")),
        cpu,
        "warn",
    ),
    Fault(
        "smi-failed",
        lambda: replace(cpu(), driver=Driver("failed", problem="nvidia-smi ended with code 255")),
        cpu,
        "unknown",
    ),
    Fault(
        "smi-hangs",
        lambda: replace(
            cpu(), driver=Driver("timeout", problem="nvidia-smi did not answer within 30 s", bus_ids=("0000:10:00.0",))
        ),
        cpu,
        "unknown",
        says=("driver lists: 1",),
    ),
    Fault(
        "smi-missing",
        lambda: replace(cpu(), driver=Driver("missing", "580.159.04")),
        lambda: replace(gpu(), gpus=(), driver=Driver("missing", "580.159.04")),
        "unknown",
    ),
    Fault("xid", lambda: with_xid(gpu(), 79), lambda: with_xid(gpu(), 31), "warn", says=("fell off the bus",)),
    Fault(
        "memory-rows",
        lambda: with_card(gpu(), remap_failed=True),
        lambda: with_card(gpu(), ecc_uncorrected=None, remap_failed=None),
        "warn",
    ),
    Fault("memory-rows", lambda: with_card(gpu(), ecc_uncorrected=2), gpu, "warn"),
    Fault(
        "compute-prohibited",
        lambda: with_torch(with_card(gpu(), compute_mode="Prohibited"), available=False),
        gpu,
        says=("--compute-mode=DEFAULT",),
    ),
    Fault(
        "compute-exclusive",
        lambda: with_card(gpu(), compute_mode="Exclusive_Process", processes=(program(500),)),
        lambda: with_card(gpu(), compute_mode="Exclusive_Process"),
    ),
    Fault("mig", lambda: with_card(gpu(), mig=True), gpu, "warn"),
    Fault(
        "driver-old",
        lambda: with_torch(
            replace(gpu(), driver=replace(gpu().driver, version="550.54", cuda="12.4")), available=False, devices=()
        ),
        lambda: with_torch(
            replace(gpu(), driver=replace(gpu().driver, version="550.54", cuda="12.4")),
            cuda="12.8",
            version="2.11.0+cu128",
        ),
        says=("550.54", "12.4", "13.0"),
    ),
    Fault(
        "torch-without-cuda",
        lambda: with_packages(
            with_torch(replace(sglang(), kernel=None), version="2.11.0+cpu", cuda=None, available=False),
            torch="2.11.0+cpu",
        ),
        sglang,
    ),
    Fault(
        "torch-without-cuda-embedded",
        lambda: with_torch(gpu(), version="2.11.0+cpu", cuda=None, available=False),
        cpu,
        "warn",
    ),
    Fault("amd", lambda: replace(cpu(), torch=replace(cpu().torch, version="2.11.0+rocm7", hip="7.0")), cpu, "unknown"),  # type: ignore[type-var]
    Fault(
        "cuda-unavailable",
        lambda: with_torch(gpu(), available=False, devices=(), said="CUDA unknown error"),
        gpu,
        says=("CUDA unknown error",),
    ),
    Fault("card-old", lambda: with_torch(gpu("6.1"), archs=("sm_61",)), lambda: gpu("8.0")),
    Fault("card-aging", lambda: gpu("7.5"), lambda: gpu("8.0"), "warn"),
    Fault("triton-missing", lambda: with_packages(gpu(), triton=None), cpu),
    Fault("compiler-missing", lambda: with_system(gpu(), compiler=None), lambda: with_system(cpu(), compiler=None)),
    Fault(
        "python-header-missing",
        lambda: with_system(gpu(), python_header=False),
        lambda: with_system(cpu(), python_header=False),
    ),
    # Memory, disk, port.
    Fault(
        "gpu-full",
        lambda: with_card(gpu(), **HELD),
        lambda: with_card(gpu(), free_mib=70_000, processes=(program(73_000),)),
        says=("python3 (pid 4711", "0.1 GiB free"),
    ),
    Fault("gpu-full", lambda: with_card(sglang(count=2), 1, **HELD), lambda: with_card(gpu(count=2), 1, **HELD)),
    Fault("memory-held", lambda: with_card(gpu(), free_mib=70_000), lambda: with_card(gpu(), free_mib=142_000), "warn"),
    Fault(
        "memory-small",
        lambda: with_weights(on_cpu(gpu()), 200_000),
        lambda: with_weights(
            on_cpu(with_card(gpu("6.1"), memory_mib=200, free_mib=100, compute_mode="Prohibited")), 300
        ),
        also=("torch-without-cuda-embedded",),
        neighbour=("torch-without-cuda-embedded",),
    ),
    Fault("memory-small", lambda: with_weights(cpu(), 200_000), lambda: with_weights(cpu(), 100_000)),
    Fault(
        "shm-small", lambda: with_system(sglang(count=8), shm_mib=64), lambda: with_system(sglang(), shm_mib=64), "warn"
    ),
    Fault(
        "disk-full",
        lambda: with_system(
            replace(cpu(), model=Checkpoint("smollm2-135m", "to fetch", weights_mib=265)),
            spaces=(Space("models of ddtree", "/cache", 200),),
        ),
        lambda: with_system(cpu(), spaces=(Space("models of ddtree", "/cache", 200),)),
        says=("/cache", "329 MiB"),
    ),
    Fault(
        "cache-closed",
        lambda: closed(replace(cpu(), model=replace(MODEL, state="to fetch", to_write=True))),
        lambda: closed(cpu()),
        says=("/cache is not a folder", "DDTREE_CACHE"),
    ),
    Fault(
        "port-taken", lambda: replace(cpu(), port=Port(30000, False, "Address already in use")), cpu, says=("30000",)
    ),
    Fault(
        "port-ephemeral",
        lambda: replace(cpu(), port=Port(40000, True)),
        lambda: replace(cpu(), port=Port(0, True)),
        "warn",
    ),
    # Model and drafter.
    Fault(
        "model-missing",
        lambda: replace(
            cpu(),
            model=Checkpoint("x", "missing", problem="there is no model called x"),
            drafter=Checkpoint("auto", "missing", problem="no drafter is known for x"),
        ),
        cpu,
        says=("there is no model called x",),
    ),
    Fault(
        "drafter-missing",
        lambda: replace(cpu(), drafter=Checkpoint("auto", "missing", problem="no drafter is known for x")),
        lambda: replace(cpu(), drafter=None, asked=replace(cpu().asked, drafter="none", mode="ar")),
        says=("ddtree serve --model smollm2-135m --mode ar --drafter none",),
    ),
    Fault(
        "drafter-missing",
        lambda: replace(sglang(), drafter=Checkpoint("auto", "missing", problem="no drafter is known for x")),
        sglang,
        says=("ddtree serve --engine sglang --model smollm2-135m --mode ar --drafter none",),
    ),
    Fault(
        "mode-without-drafter",
        lambda: replace(cpu(), drafter=None, asked=replace(cpu().asked, drafter="none")),
        lambda: replace(cpu(), drafter=None, asked=replace(cpu().asked, mode="ar")),
        says=("mode tree needs a drafter: load one with --drafter, or use mode ar",),
    ),
    Fault(
        "model-damaged",
        lambda: replace(cpu(), model=Checkpoint("org/model", "missing", damage="x is damaged")),
        cpu,
        says=("x is damaged", "hf download org/model --force-download"),
    ),
    Fault(
        "model-damaged",
        lambda: replace(cpu(), model=Checkpoint("tiny-0123", "missing", damage="it was converted by another version")),
        cpu,
        says=("give the .gguf file that it was converted from",),
    ),
    Fault(
        "drafter-damaged",
        lambda: replace(cpu(), drafter=Checkpoint("./d", "missing", "./d", damage="x is damaged")),
        cpu,
        says=("x is damaged", "copy or download again what is in ./d"),
    ),
    Fault(
        "model-elsewhere",
        lambda: replace(cpu(), model=Checkpoint("org/model", "to fetch")),
        lambda: replace(cpu(), model=Checkpoint("smollm2-135m", "to fetch", weights_mib=265)),
        "unknown",
        says=("hf download org/model",),
    ),
    Fault("drafter-elsewhere", lambda: replace(cpu(), drafter=Checkpoint("org/drafter", "to fetch")), cpu, "unknown"),
    Fault(
        "model-refused",
        lambda: replace(cpu(), model=replace(MODEL, refusal=QWEN3)),
        lambda: replace(sglang(), model=replace(MODEL, refusal=QWEN3)),
    ),
    Fault(
        "drafter-refused",
        lambda: replace(cpu(), drafter=replace(DRAFTER, refusal=DRAFTX)),
        lambda: replace(sglang(), drafter=replace(DRAFTER, refusal=DRAFTX)),
    ),
    # What is installed.
    Fault(
        "requirement-unmet",
        lambda: replace(cpu(), requirements=(Requirement("ddtree", "transformers", ">=5.12", "4.57.1"),)),
        lambda: replace(cpu(), requirements=(Requirement("ddtree", "transformers", ">=5.12", "5.12.1"),)),
        says=("transformers>=5.12", "4.57.1"),
    ),
    Fault(
        "requirement-of-sglang",
        lambda: replace(sglang(), requirements=(Requirement("sglang", "outlines", "==0.1.11", None),)),
        lambda: replace(sglang(), requirements=(Requirement("sglang", "torchcodec", "==0.8.0", None),)),
        "warn",
    ),
    Fault(
        "import-crashed",
        lambda: failing(cpu(), "ddtree.engine", "Fatal Python error: Segmentation fault", signal="SIGSEGV"),
        cpu,
        says=("SIGSEGV",),
    ),
    Fault(
        "import-slow",
        lambda: replace(
            cpu(),
            imports=(Import("torch", True), Import("ddtree.engine", False, "it did not end within 180 s", None, True)),
        ),
        cpu,
        "unknown",
    ),
    Fault(
        "import-no-library",
        lambda: failing(sglang(), "sgl_kernel", NVRTC, of_it=(SERVER,)),
        sglang,
        says=("libnvrtc.so.13", "LD_LIBRARY_PATH"),
    ),
    Fault("import-failed", lambda: failing(cpu(), "ddtree.engine", "ValueError: bad"), cpu, says=("ValueError: bad",)),
    Fault(
        "library-missing",
        lambda: failing(
            replace(sglang(), libraries={"libnuma.so.1": False}),
            "sgl_kernel",
            "ImportError: libnuma.so.1: cannot open shared object file",
            of_it=(SERVER,),
        ),
        lambda: replace(sglang(), libraries={"libnuma.so.1": False}),
        says=("apt-get install libnuma1",),
    ),
]
