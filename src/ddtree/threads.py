"""How torch's threads wait for each other. A leaf; it must run before torch is imported."""

import os
from collections.abc import MutableMapping

# Spins before a waiting thread sleeps. On idle cores as fast as libgomp's own choice, which spins far longer and so, on
# cores shared with another program, spends whole scheduler slices waiting: 30 times slower (docs/log.md).
SPINS = "10000"


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting OpenMP threads sleep soon, unless the user has said how they wait."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
