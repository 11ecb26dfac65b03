"""Whether NCCL works between the GPUs of this machine, and by which of its ways: asked before servers rely on it.

python benchmarks/sglang_peers.py --gpus 2

As a server of several GPUs does, its processes add up a small and a large tensor, eagerly and in a captured graph.
A way that does not answer in time is ended, and the next is tried: CUDA IPC (what SGLang sets where the environment
does not say), CUDA's virtual memory between processes (NCCL's default), and the host's memory.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

from sglang_servers import NO_MULTICAST, free_port

WAYS = {  # the first that works is taken; SGLang's own is the first
    "IPC": {"NCCL_CUMEM_ENABLE": "0"},
    "virtual memory": {"NCCL_CUMEM_ENABLE": "1"},
    "host memory": {"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1"},
}
SIZES = (64, 1 << 22)  # elements


def way(gpus: int, limit_s: float = 60) -> tuple[str | None, dict[str, str], dict[str, str]]:
    """The first way that works, its environment, and what every tried way said. None: no way works."""
    said: dict[str, str] = {}
    for name, extra in WAYS.items():
        said[name] = attempt(gpus, NO_MULTICAST | extra, limit_s)
        print(f"NCCL by {name}: {said[name]}", flush=True)
        if said[name] == "ok":
            return name, NO_MULTICAST | extra, said
    return None, {}, said


def attempt(gpus: int, environment: dict[str, str], limit_s: float) -> str:
    """ "ok", or what went wrong."""
    port = str(free_port())
    command = [sys.executable, os.path.abspath(__file__), "--gpus", str(gpus), "--port", port, "--rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | {"NCCL_DEBUG": "WARN"},
            start_new_session=True,
        )
        for rank in range(gpus)
    ]
    end, late = time.monotonic() + limit_s, False
    while any(one.poll() is None for one in processes) and not any(one.poll() for one in processes) and not late:
        time.sleep(0.2)
        late = time.monotonic() > end
    broken, outputs = [bool(one.poll()) for one in processes], []
    for one in processes:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
        outputs.append(one.communicate(timeout=20)[0].decode(errors="replace").strip()[-400:])
    if late:
        return f"no answer within {limit_s:.0f} s; {' | '.join(filter(None, outputs))}"
    wrong = [text for text, bad in zip(outputs, broken, strict=True) if bad]
    return wrong[0] or "ended without a word" if wrong else "ok"


def add_up(rank: int, gpus: int, port: int) -> None:
    """One process: sums of ones, eagerly and in a graph."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=gpus)
    for size in SIZES:
        values = torch.ones(size, device="cuda")
        dist.all_reduce(values)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(values)
        graph.replay()
        torch.cuda.synchronize()
        if not bool((values == gpus * gpus).all()):
            raise SystemExit(f"rank {rank}: {size} elements add up to {values[:4].tolist()}, not {gpus * gpus}")
    dist.destroy_process_group()


def main() -> None:
    """See the top of the file."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--limit-s", type=float, default=60, help="for each way")
    made.add_argument("--rank", type=int, help="as one of the processes")
    made.add_argument("--port", type=int)
    options = made.parse_args()
    if options.rank is not None:
        add_up(options.rank, options.gpus, options.port)
    else:
        sys.exit(way(options.gpus, options.limit_s)[0] is None)


if __name__ == "__main__":
    main()
