"""What the plug-in relies on in SGLang, read from its source files and compared with the releases it knows."""

import ast
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ddtree.sglang.signatures import RELEASES, Release

Reader = Callable[[str], str | None]  # the source of a module by its dotted name; None: there is no such module


def problem(read: Reader) -> str | None:
    """None where a known release fits; else what differs, for the log."""
    if known(read) is not None:
        return None
    found = {name: differences(read, release) for name, release in RELEASES.items()}
    closest = min(found, key=lambda name: len(found[name]))
    version = version_of(read)
    return (
        f"DDTREE is not registered: this SGLang ({version or 'of unknown version'}) is not as the plug-in knows it. "
        f"Compared with {closest}: {'; '.join(found[closest])}. "
        f"Known releases: {', '.join(RELEASES)}. Install one of them (pip install sglang=={next(iter(RELEASES))})."
    )


def known(read: Reader) -> str | None:
    """The name of the release that a source is, as far as the plug-in relies on it; None: none that it knows."""
    return next((name for name, release in RELEASES.items() if not differences(read, release)), None)


def differences(read: Reader, release: Release) -> list[str]:
    """Everything in which a source differs from a release, one line each."""
    parsed = lru_cache(lambda module: _parse(read(module)))
    found: list[str] = []
    for place, expected in release.signatures.items():
        module, name = _place(place)
        node = _find(parsed(module), name)
        actual = _signature(node) if isinstance(node, ast.FunctionDef) else None
        if actual != expected:
            found.append(f"{module}.{name} is {'missing' if actual is None else actual}, expected {expected}")
    for place, names in release.fields.items():
        module, name = _place(place)
        node = _find(parsed(module), name)
        has = set(_fields(node)) if isinstance(node, ast.ClassDef) else set()
        found += [f"{module}.{name} has no {field}" for field in names if field not in has]
    for place, names in release.imports.items():
        module, _ = _place(place)
        has = set(_imported(parsed(module)))
        found += [f"{module} does not import {name}" for name in names if name not in has]
    return found


def installed() -> Reader:
    """The source of the SGLang that would be imported."""
    spec = find_spec("sglang")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return lambda module: _first(root.parent / path for root in roots for path in _paths(module))


def wheel(path: Path) -> Reader:
    """The source in a wheel file, which need not be installed."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    def read(module: str) -> str | None:
        for place in _paths(module):
            if place in names:
                return archive.read(place).decode()
        return None

    return read


def version_of(read: Reader) -> str | None:
    """The version that a source says it has."""
    for line in (read("sglang._version") or read("sglang.version") or "").splitlines():
        names, _, value = line.rpartition("=")
        if "__version__" in names and value.strip()[:1] in ("'", '"'):
            return value.strip().strip("'\"")
    return None


def _place(text: str) -> tuple[str, str]:
    module, _, name = text.partition(":")
    return f"sglang.srt.{module}", name


def _paths(module: str) -> tuple[str, str]:
    base = module.replace(".", "/")
    return f"{base}.py", f"{base}/__init__.py"


def _first(paths: Iterator[Path]) -> str | None:
    for path in paths:
        if path.is_file():
            return path.read_text()
    return None


def _parse(source: str | None) -> ast.Module | None:
    return None if source is None else ast.parse(source)


def _find(tree: ast.AST | None, name: str) -> ast.AST | None:
    for part in name.split("."):
        body = getattr(tree, "body", [])
        tree = next((node for node in body if getattr(node, "name", None) == part), None)
    return tree


def _imported(tree: ast.Module | None) -> Iterator[str]:
    """Names that a module takes from others at its top."""
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def _signature(node: ast.FunctionDef) -> str:
    """Parameters and defaults, without types."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(node.args)})"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """What a class declares, defines or sets on itself."""
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.FunctionDef):
            yield part.name
        targets = (
            part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id == "__slots__" and isinstance(part, ast.Assign):
                yield from (str(name) for name in ast.literal_eval(part.value))
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr
