"""How torch's threads wait for each other. A leaf; `share_cores` must run before torch is imported."""

import os
import threading
from collections.abc import Callable, MutableMapping
from typing import TypeVar

T = TypeVar("T")

# Spins before a waiting thread sleeps. On idle cores as fast as libgomp's own choice, which spins far longer and so, on
# cores shared with another program, spends whole scheduler slices waiting: 30 times slower (docs/log.md).
SPINS = "10000"


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting OpenMP threads sleep soon, unless the user has said how they wait."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def in_passing_thread(work: Callable[[], T]) -> T:
    """Do `work` in a thread that ends with it. Raises what it raises.

    For a process whose engine then runs in another thread than the main one: each thread that computes has OpenMP
    threads of its own until it ends, and where these are more than the cores in all, libgomp lets every wait end in
    sleep: a quarter of the speed on two cores (docs/log.md).
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ddtree-load", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
