"""A deployment as the files that it runs from. Pure: the same deployment gives the same text."""

from collections.abc import Collection

from ddtree.deploy import nginx
from ddtree.deploy.quoting import environment_line
from ddtree.deploy.spec import Deployment, Replica
from ddtree.deploy.units import replica_unit, router_unit

MADE = "# Made by `ddtree deploy render` from "  # the beginning of every rendered file


def render(deployment: Deployment, down: Collection[str] = ()) -> dict[str, str]:
    """Text by path: HOST/systemd/NAME-I.service, HOST/env/NAME-I.env, and the router's HOST/systemd/NAME-router.service
    and HOST/nginx/NAME.conf.

    Args:
        down: names of replicas that the hosts' own nginx sends nothing new to.
    """
    d = deployment
    files: dict[str, str] = {}
    for host in d.hosts:
        for replica in d.on(host):
            files[f"{host}/systemd/{replica.name}.service"] = replica_unit(d, replica)
            files[f"{host}/env/{replica.name}.env"] = _environment(replica)
        if d.routed != "none":
            files[f"{host}/systemd/{d.router_name}.service"] = router_unit(d, host)
        if d.routed == "nginx":
            files[f"{host}/nginx/{d.name}.conf"] = nginx.config(d, host, down)
    source = d.source or "a program"
    head = f"{MADE}{source}: edits are lost. Change {source}, and render again.\n"
    return {path: f"{head}\n{text}" for path, text in files.items()}


def _environment(replica: Replica) -> str:
    return "".join(f"{environment_line(name, value)}\n" for name, value in replica.environment.items())
