"""What the fields of a deployment must be to each other."""

from typing import TYPE_CHECKING

from ddtree.deploy import limits
from ddtree.errors import InvalidOption
from ddtree.settings import within, wrong

if TYPE_CHECKING:
    from ddtree.deploy.spec import Deployment

LOCAL = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")


def check(d: "Deployment") -> None:
    """Raises InvalidOption, naming a field, where fields contradict each other, or ports collide."""
    if sum(name in LOCAL for name in d.hosts) > 1:
        raise wrong("hosts", list(d.hosts), "of different machines: these are names of one")
    if (d.scope == "system") != bool(d.user):
        raise wrong("user", d.user, 'a user\'s name with scope "system" (services run as it), else left out')
    if d.user:
        limits.user(d.user)
        for option in ("secrets", "folder"):
            if (value := getattr(d, option)).startswith("~"):
                raise wrong(option, value, 'a path that begins with / with scope = "system"')
    if d.gpus_per_replica > 1 and d.engine == "embedded":
        raise wrong("gpus_per_replica", d.gpus_per_replica, '1: the embedded engine runs on one device; '
                    'more with engine = "sglang"')  # fmt: skip
    if d.gpus_per_replica > 1 and d.replicas_per_gpu > 1:
        raise wrong("replicas_per_gpu", d.replicas_per_gpu, f"1 where gpus_per_replica is "
                    f"{d.gpus_per_replica}: a replica over several GPUs shares none")  # fmt: skip
    if d.gpus and d.cpu_replicas > 1:
        raise wrong("cpu_replicas", d.cpu_replicas, 'left out where gpus are named: replicas_per_gpu and '
                    'gpus_per_replica say how many there are')  # fmt: skip
    if not d.gpus:
        for option in ("replicas_per_gpu", "gpus_per_replica"):
            if getattr(d, option) > 1:
                raise wrong(option, getattr(d, option), 'left out where gpus is "none": see cpu_replicas')
        if d.engine == "sglang":
            raise wrong("gpus", "none", 'a list of GPUs with engine = "sglang", which needs one')
    if len(d.gpus) % d.gpus_per_replica:
        raise wrong("gpus_per_replica", d.gpus_per_replica, f"a divisor of the {len(d.gpus)} GPUs")
    limits.parallelism(d.args, d.gpus_per_replica)
    _check_ports(d)


def _check_ports(d: "Deployment") -> None:
    within("port", d.port, 1024, 65536 - d.per_host)
    _check_router_reads(d)
    if d.routed == "none":
        return
    last = d.port + d.per_host - 1
    if d.port <= d.router.port <= last:
        raise wrong("router.port", d.router.port, f"none of the replicas' ports {d.port} to {last}")
    if d.scope == "user" and d.router.port < 1024:
        raise wrong("router.port", d.router.port, 'at least 1024 with scope = "user"')
    others = [name for name in d.hosts if name not in LOCAL]
    if d.router.reach == "all" and len(d.hosts) > 1 and d.host not in EVERYWHERE:
        raise wrong("host", d.host, 'one that means every address, as 0.0.0.0, with router.reach = "all" '
                    f"and hosts {', '.join(d.hosts)}")  # fmt: skip
    if d.router.reach == "all" and others and len(others) < len(d.hosts):
        raise wrong("hosts", list(d.hosts), 'without localhost with router.reach = "all": name every host as '
                    "the others reach it")  # fmt: skip


def _check_router_reads(d: "Deployment") -> None:
    """Raises InvalidOption for a field of [router] that this kind of router does not read."""
    fields = {
        "nginx": ("args",), "sglang-router": ("program", "max_body_mib"),
        "none": ("host", "port", "reach", "program", "args", "max_body_mib"),
    }  # fmt: skip
    for name in fields[d.routed]:
        if getattr(d.router, name) != getattr(type(d.router)(), name):
            raise InvalidOption(f"router.{name} means nothing to the router {d.routed}: leave it out",
                                param=f"router.{name}")  # fmt: skip
