"""The host: Python, memory, disk, compiler, port. Looks, and writes nothing."""

import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import tempfile
from pathlib import Path

from ddtree.doctor.facts import Port, Space, System
from ddtree.doctor.smi import ask
from ddtree.errors import DDTreeError
from ddtree.models import cache_dir, store
from ddtree.plan import MIB, machine_memory

# Variables that change what a fault comes to, or explain it. Names only: no key or token is among them.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DDTREE_CACHE",
    "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_VERSION_CHECK", "TRITON_INTERPRET", "TRITON_CACHE_DIR",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "PYTORCH_NVML_BASED_CUDA_CHECK", "CC",
)  # fmt: skip


def look() -> System:
    """The host as it is now."""
    memory = machine_memory()
    return System(
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.system(),
        machine=platform.machine(),
        glibc=platform.libc_ver()[1] or None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_mib=_memory(),
        shm_mib=_size("/dev/shm"),
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        python_header=_python_header(),
        nvcc=_nvcc(),
        ephemeral=_ephemeral(),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        spaces=_spaces(),
        memory_total_mib=None if memory is None else memory.total // MIB,
    )


def look_at_port(number: int) -> Port:
    """Whether 127.0.0.1 can be listened on at that port; 0 always can."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            sock.bind(("127.0.0.1", number))
            sock.listen()
        except OSError as error:
            return Port(number, False, error.strerror)
    return Port(number, True)


def _python_header() -> bool:
    schemes = {sysconfig.get_default_scheme(), "posix_prefix"} & set(sysconfig.get_scheme_names())
    folders = [sysconfig.get_paths(scheme)["include"] for scheme in schemes]
    for variable in ("CPATH", "C_INCLUDE_PATH"):
        folders += os.environ.get(variable, "").split(os.pathsep)
    return any((Path(folder) / "Python.h").is_file() for folder in folders if folder)


def _memory() -> int | None:
    """Memory that can be had without swapping, under the limit of the container where there is one."""
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    if found is None:
        return None
    available = int(found[1]) // 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no limit, or the older kind of groups
        return available
    return min(available, max(0, limit - used) // MIB)


def _size(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).total // MIB
    except OSError:
        return None


def _spaces() -> tuple[Space, ...]:
    home = Path.home()
    try:
        cache = {"models of ddtree": cache_dir()}
    except (ImportError, DDTreeError):  # a part of ddtree is missing, or its variable is wrong: found elsewhere
        cache = {}
    places = cache | {
        "models of the hub": Path(os.environ.get("HF_HOME", home / ".cache/huggingface")),
        "compiled kernels": Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton")),
        "temporary files": Path(tempfile.gettempdir()),
    }
    # Only where the engine itself would write: the others have variables and fallbacks of their own.
    closed = {purpose: _closed(store.models_dir()) for purpose in cache}
    return tuple(Space(purpose, str(path), _free(path), closed.get(purpose)) for purpose, path in places.items())


def _closed(path: Path) -> str | None:
    """Why no folder can be made or filled there; None where one can."""
    for place in (path, *path.parents):
        if os.path.isdir(place):
            return None if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"
        if os.path.lexists(place):
            return f"{place} is not a folder"
    return None


def _free(path: Path) -> int | None:
    """Free room of the file system that the nearest existing folder is on."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free // MIB
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for program in ([str(Path(home) / "bin/nvcc")] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        said = ask([program, "--version"])
        found = re.search(r"release (\d+\.\d+)", said.out) if said else None
        if found:
            return found[1]
    return None


def _ephemeral() -> tuple[int, ...]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return ()
    return int(low), int(high)
