"""What was seen of a machine: frozen, plain data, so that a recording of one machine can be judged on another.

None means "not known" everywhere: what is not known raises no finding. Sizes are in MiB.
"""

from dataclasses import dataclass, field
from typing import Any

from ddtree.config import EngineConfig


@dataclass(frozen=True)
class Asked:
    """What the user means to run."""

    engine: str = "embedded"  # embedded or sglang
    model: str = "smollm2-135m"
    drafter: str = "auto"
    port: int = 30000  # 0: a free one
    attention_backend: str | None = None  # of SGLang; None: the one that suits the card
    grammar_backend: str | None = None
    mode: str = "tree"  # how to decode
    max_model_len: int | None = None  # of the embedded engine, as the next two; None: what the model was made for
    max_running_requests: int = EngineConfig.max_running_requests
    max_tree_budget: int | None = None  # None: the engine's default

    @property
    def loaded_drafter(self) -> str:
        """The drafter that is loaded, as the engine has it: plain decoding takes none that nobody named."""
        plain = self.mode == "ar" and (self.engine == "sglang" or self.drafter == "auto")
        return "none" if plain else self.drafter


@dataclass(frozen=True)
class Space:
    """Free room where something will be written."""

    purpose: str
    path: str
    free_mib: int | None
    problem: str | None = None  # why nothing can be written there


@dataclass(frozen=True)
class System:
    """The host and its Python."""

    python: str  # 3.11.7
    executable: str
    platform: str  # Linux
    machine: str  # x86_64
    glibc: str | None
    cores: int
    memory_mib: int | None  # that can still be had
    shm_mib: int | None  # size of /dev/shm
    compiler: str | None  # what Triton would call
    python_header: bool  # Python.h is where a compiler looks for it
    nvcc: str | None  # version of the CUDA toolkit on the PATH or in CUDA_HOME
    ephemeral: tuple[int, ...]  # first and last port that the system hands out by itself; empty: not known
    environment: dict[str, str] = field(default_factory=dict)  # the variables that change what is judged
    spaces: tuple[Space, ...] = ()
    memory_total_mib: int | None = None  # that this process may ever have


@dataclass(frozen=True)
class Port:
    """Whether the port can be listened on."""

    number: int
    free: bool
    error: str | None = None


@dataclass(frozen=True)
class Process:
    """A program that holds memory of a GPU."""

    pid: int
    name: str
    memory_mib: int | None


@dataclass(frozen=True)
class Gpu:
    """One card, as nvidia-smi tells; `problem` is what it said in place of an answer."""

    index: int | None
    bus_id: str | None  # 00000000:65:00.0
    name: str | None = None
    uuid: str | None = None
    capability: str | None = None  # 9.0
    memory_mib: int | None = None
    free_mib: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None  # memory rows wait for a reset to be replaced
    remap_failed: bool | None = None  # no spare rows are left
    compute_mode: str | None = None
    mig: bool | None = None
    processes: tuple[Process, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Xid:
    """The last error of one card in the kernel's log."""

    bus_id: str
    code: int
    text: str


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, and whether nvidia-smi answered."""

    smi: str  # ok, missing, failed or timeout
    version: str | None = None
    cuda: str | None = None  # the highest CUDA it can serve
    problem: str | None = None
    bus_ids: tuple[str, ...] = ()  # the cards that the driver itself lists
    xids: tuple[Xid, ...] | None = None  # None: the kernel's log could not be read


@dataclass(frozen=True)
class Device:
    """A card as torch sees it."""

    name: str
    capability: str
    memory_mib: int


@dataclass(frozen=True)
class Torch:
    """What torch says of itself, in a process of its own."""

    version: str
    cuda: str | None  # the CUDA it was built for; None: a build for CPUs
    hip: str | None
    archs: tuple[str, ...]  # sm_90, compute_120, ...
    available: bool
    devices: tuple[Device, ...] = ()
    said: str | None = None  # why CUDA is not available, in torch's words


@dataclass(frozen=True)
class Import:
    """One import, tried in a process of its own."""

    module: str
    ok: bool
    error: str | None = None
    signal: str | None = None  # SIGSEGV, ...: it crashed
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Requirement:
    """What an installed distribution asks for, markers and extras already applied."""

    by: str
    package: str
    wanted: str  # a version specifier; empty: any
    installed: str | None


@dataclass(frozen=True)
class Kernel:
    """SGLang's compiled kernels."""

    version: str
    cuda: str | None  # major version of the libcudart they ask for


@dataclass(frozen=True)
class Context:
    """What of a model or drafter says how much memory its keys and values take."""

    layers: int
    kv_heads: int
    head_dim: int
    longest: int  # positions that it was made for
    block: int = 0  # rows that a drafter computes at once, the root's included; 0: a target


@dataclass(frozen=True)
class Checkpoint:
    """A model or drafter: what its name stands for, and what its files say."""

    name: str
    state: str  # here, to fetch, or missing
    folder: str | None = None
    problem: str | None = None  # why it is missing
    weights_mib: int | None = None  # in 16 bits, or fewer where they are stored so
    config: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None  # the embedded engine's
    misfit: str | None = None  # a drafter's with its target
    draft_vocab: int | None = None  # tokens that a drafter's list has drafts made of; None: all
    damage: str | None = None  # what is wrong in its files, so that they must be had anew
    to_write: bool = False  # the first start writes it into ddtree's own cache
    context: Context | None = None  # where the embedded engine reads its configuration


@dataclass(frozen=True)
class Facts:
    """One machine."""

    asked: Asked
    system: System
    driver: Driver
    port: Port
    gpus: tuple[Gpu, ...] = ()
    torch: Torch | None = None
    packages: dict[str, str] = field(default_factory=dict)  # distribution -> version, of those that matter
    requirements: tuple[Requirement, ...] = ()
    imports: tuple[Import, ...] = ()
    kernel: Kernel | None = None
    libraries: dict[str, bool] = field(default_factory=dict)  # soname -> loads
    model: Checkpoint | None = None
    drafter: Checkpoint | None = None  # None where none is loaded, or it was not looked at
