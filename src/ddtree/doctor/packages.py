"""Installed distributions: versions, what they ask for, and the CUDA of SGLang's kernels. Imports none of them."""

import mmap
import re
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ddtree.doctor import facts

CUDART = re.compile(rb"libcudart\.so\.(\d+)")


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those distributions that are installed."""
    found = {name: version(name) for name in names}
    return {name: number for name, number in found.items() if number is not None}


def version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed, or its metadata is damaged."""
    try:
        return metadata.version(name) or None
    except metadata.PackageNotFoundError:
        return None


def requirements(name: str) -> Iterator[facts.Requirement]:
    """What an installed distribution asks for here, its extras left out."""
    try:
        wanted = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for text in wanted:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            package = canonicalize_name(requirement.name)
            yield facts.Requirement(name, package, str(requirement.specifier), version(package))


def kernel(names: Iterable[str]) -> facts.Kernel | None:
    """SGLang's kernels under the first of these names that is installed, and the CUDA runtime that they load."""
    for name in names:
        number = version(name)
        if number is not None:
            return facts.Kernel(number, _cuda(name, number))
    return None


def _cuda(name: str, number: str) -> str | None:
    local = re.search(r"\+cu(\d{2,})", number)
    if local:
        return local[1][:2]
    for path in metadata.files(name) or []:
        if path.name.startswith("common_ops") and path.suffix == ".so":
            try:
                with (
                    open(str(path.locate()), "rb") as file,
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                ):
                    found = CUDART.search(data)
                    if found:
                        return found[1].decode()
            except (OSError, ValueError):
                continue
    return None
