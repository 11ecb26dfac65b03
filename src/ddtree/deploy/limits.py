"""What the values of a deployment's file may be. Each check raises InvalidOption, naming the field and the remedy."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ddtree.deploy.command import DATA_PARALLEL, TENSOR_PARALLEL, named
from ddtree.errors import InvalidOption
from ddtree.settings import wrong

OLDEST_SYSTEMD = 247  # of Debian 11: every key that is rendered is known there
NAME = re.compile(r"[a-z][a-z0-9-]{0,47}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
ADDRESS = re.compile(r"[A-Za-z0-9.:-]+")
GPU = re.compile(r"\d{1,3}|(GPU|MIG)-[0-9A-Za-z/-]+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
PATH = re.compile(r"(/|~/)[^\x00-\x1f\x7f$\"'`\\;{}]*")  # units and nginx read paths, too
SECRET = re.compile(r"--(\w+-)*(api-key|password|passwd|secret|hf-token|auth-token|access-token)s?")
# What the file says by a field of its own, by flag.
FIELDS = {
    "--model": "model", "--model-path": "model", "--drafter": "drafter", "--mode": "mode", "--engine": "engine",
    "--host": "host", "--port": "port", "--shutdown-timeout": "stop_seconds", "--device": "gpus",
    "--base-gpu-id": "gpus", "--speculative-draft-model-path": "drafter",
}  # fmt: skip
PINNING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def name(field: str, value: str) -> None:
    """Of units and files."""
    if not NAME.fullmatch(value):
        raise wrong(field, value, "small letters, digits and -, a letter first, at most 48 of them")


def hosts(names: Sequence[str]) -> None:
    """At least one, none twice; each is a folder's name and part of an address too."""
    if not names:
        raise wrong("hosts", [], 'at least one name, as ["localhost"]')
    for host in names:
        if not HOST.fullmatch(host) or ".." in host:
            raise wrong("hosts", host, "a host's name or an IPv4 address")
    _once("hosts", names)


def address(field: str, value: str) -> None:
    """To listen on."""
    if not ADDRESS.fullmatch(value):
        raise wrong(field, value, "an address to listen on, as 127.0.0.1 or 0.0.0.0")


def gpus_of_file(value: Any) -> Any:
    """The field as a list of text: "none" is an empty one, and indices may be numbers."""
    if value == "none":
        return []
    listed = isinstance(value, list) and value and all(type(one) in (int, str) for one in value)
    if not listed:
        raise wrong("gpus", value, 'a list of indices or UUIDs, as [0, 1], or "none"')
    return [str(one) for one in value]


def gpus(names: Sequence[str]) -> None:
    """Indices or UUIDs, none twice; not both kinds, since one could hide behind the other."""
    for gpu in names:
        if not GPU.fullmatch(gpu) or (gpu.isdigit() and gpu != str(int(gpu))):
            raise wrong("gpus", gpu, "an index as nvidia-smi counts, or a UUID as nvidia-smi -L shows it")
    if len({gpu.isdigit() for gpu in names}) > 1:
        raise wrong("gpus", list(names), "all indices, or all UUIDs: of both, two could be one card")
    _once("gpus", names)


def environment(values: Mapping[str, str]) -> None:
    """What systemd keeps of an environment file, and nothing that another field says."""
    for variable, value in values.items():
        if not VARIABLE.fullmatch(variable):
            raise wrong(f"environment.{variable}", value, "called by letters, digits and _, no digit first")
        if variable in PINNING:
            raise wrong(f"environment.{variable}", value, "left out: gpus says which cards are seen")
        if any((ord(c) < 32 and c not in "\t\n") or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in value):
            raise wrong(f"environment.{variable}", value, "text without control characters: systemd would drop it")


def args(given: Sequence[str], engine: str) -> None:
    """Flags that go to the server; none that a field says, and no secret, which a list of processes would show."""
    words("args", given)
    for word in given:
        flag = word.partition("=")[0]
        if flag in FIELDS:
            raise InvalidOption(f"args holds {flag}, which the field {FIELDS[flag]} says: set that one", param="args")
        if SECRET.fullmatch(flag):
            ours = "DDTREE_API_KEY in the file that `secrets` names"
            theirs = "SGLang's own --config FILE, a file that only its user may read"
            remedy = ours if engine == "embedded" else theirs
            raise InvalidOption(f"args holds {flag}: every list of processes would show it; use {remedy}", param="args")


def words(field: str, given: Sequence[str]) -> None:
    """Words of a command line."""
    for word in given:
        if not word or not word.isprintable():
            raise wrong(field, word, "printable text that is not empty")


def model(field: str, value: str) -> None:
    """A name, a hub id or an absolute path: services start in a folder of their own."""
    words(field, (value,))
    if value.startswith((".", "~")):
        raise wrong(field, value, "a name, a hub id, or a path that begins with /")


def absolute(field: str, value: str) -> None:
    """A path that means the same wherever a service starts."""
    if not PATH.fullmatch(value):
        raise wrong(field, value, "a path that begins with / or ~/, without quotes, $, \\, ;, { and }")
    if field in ("python", "router.program", "cache") and value.startswith("~"):
        raise wrong(field, value, "a path that begins with /: systemd takes no other here")


def user(value: str) -> None:
    """Whom services run as."""
    if not USER.fullmatch(value):
        raise wrong("user", value, "the name of a user of each host")


def parallelism(given: tuple[str, ...], gpus_per_replica: int) -> None:
    """SGLang's own sizes, where `args` names them, must use exactly the replica's GPUs."""
    tensor, data = named(given, TENSOR_PARALLEL), named(given, DATA_PARALLEL)
    if (tensor is None and data is None) or named(given, ("--nnodes",)) is not None:
        return
    if tensor is None:
        raise InvalidOption(f"args holds {DATA_PARALLEL[0]} without --tp-size: name both, their product is "
                            f"gpus_per_replica, here {gpus_per_replica}", param="args")  # fmt: skip
    shared = named(given, ("--enable-dp-attention",)) is not None  # then the copies share the GPUs of one tensor group
    sizes = [tensor] if data is None or shared else [tensor, data]
    if not all(size.isdigit() for size in sizes):
        raise wrong("args", list(given), "flags with a whole number each for --tp-size and --dp-size")
    product = 1
    for size in sizes:
        product *= int(size)
    if product != gpus_per_replica:
        raise wrong("gpus_per_replica", gpus_per_replica, f"{product}, as --tp-size and --dp-size in args ask for")


@cache
def systemd_here() -> int:
    """The version of systemd on this machine; the oldest supported one where there is none."""
    program = shutil.which("systemd-analyze") or shutil.which("systemctl")
    if program is None:
        return OLDEST_SYSTEMD
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return OLDEST_SYSTEMD
    found = re.match(r"systemd (\d+)", said)
    return int(found[1]) if found else OLDEST_SYSTEMD


def _once(field: str, names: Sequence[str]) -> None:
    for one in names:
        if names.count(one) > 1:
            raise wrong(field, list(names), f"a list that names {one} once")
