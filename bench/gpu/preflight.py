"""What this machine is, and what does not fit together: one sentence for each mismatch, which says what to do."""

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

GIB = 1 << 30
DRIVER_13 = "580"  # the first driver for CUDA 13
OWN = "on your own machine, sudo nvidia-smi"  # a borrowed one's settings are its owner's


@dataclass(frozen=True)
class Facts:
    """What facts.py found; a field that it could not find is empty."""

    executable: str = ""
    missing: tuple[str, ...] = ()  # modules
    versions: Mapping[str, str | None] = field(default_factory=dict)
    required: Mapping[str, str] = field(default_factory=dict)  # least versions
    pinned_triton: str | None = None  # by torch
    torch_cuda: str | None = None  # that torch was built for
    hip: str | None = None
    torch_says: str = ""  # its warning when there is no device
    available: bool = False
    devices: int = 0
    name: str = ""
    uuid: str = ""
    capability: tuple[int, int] | None = None
    memory: int = 0  # bytes
    sms: int = 0
    driver_cuda: str | None = None  # the newest that the driver supports
    ptxas: tuple[str, str] | None = None  # path and version of the one that Triton runs for this GPU
    assemblers: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # all that Triton brings
    cache: str = ""  # Triton's, on disk
    device_file: bool = False  # whether specker sees the driver's device, and so makes its kernels when it is imported
    triton_key: str = ""  # of Triton's files
    compiler: str | None = None  # of C
    headers: bool = True  # of Python
    folder: str = ""  # of results
    commit: str = "unknown"

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Facts":
        def frozen(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        return cls(**{f.name: frozen(found[f.name]) for f in fields(cls) if f.name in found})


@dataclass(frozen=True)
class Smi:
    """What nvidia-smi says about one GPU; "" where it says nothing."""

    driver: str = ""
    cuda: str = ""
    name: str = ""
    persistence: str = ""
    mig: str = ""
    compute_mode: str = ""
    ecc: str = ""
    memory_total: str = ""
    memory_used: str = ""
    temperature: str = ""
    clock: str = ""  # of the SMs now
    application_clock: str = ""
    max_clock: str = ""
    memory_clock: str = ""
    max_memory_clock: str = ""
    power_limit: str = ""
    default_power_limit: str = ""
    reasons: tuple[str, ...] = ()  # why clocks are lowered


@dataclass(frozen=True)
class Problem:
    sentence: str
    fatal: bool = False  # nothing would run


def nvidia_smi(uuid: str = "") -> Smi | None:
    """The GPU with this uuid, else the first; None without nvidia-smi or without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-q", "-x"], capture_output=True, text=True, timeout=60)
        return parse(done.stdout, uuid)
    except (OSError, subprocess.TimeoutExpired, ElementTree.ParseError):
        return None


def parse(text: str, uuid: str = "") -> Smi | None:
    """The output of `nvidia-smi -q -x`, whose names differ between drivers."""
    log = ElementTree.fromstring(text)
    gpus = log.findall("gpu")
    if not gpus:
        return None
    gpu = next((g for g in gpus if uuid and uuid in (g.findtext("uuid") or "")), gpus[0])

    def value(*paths: str, of: ElementTree.Element = gpu) -> str:
        found = (of.findtext(path) for path in paths)
        text = next((text.strip() for text in found if text), "")
        return "" if text in ("N/A", "[N/A]", "Requested functionality has been deprecated") else text

    reasons = [
        re.sub(r"^clocks_(?:event|throttle)_reason_", "", reason.tag).replace("_", " ")
        for name in ("clocks_event_reasons", "clocks_throttle_reasons")
        for reason in gpu.findall(f"{name}/*")
        if (reason.text or "").strip() == "Active"
    ]
    power = ("gpu_power_readings", "power_readings")
    return Smi(
        driver=value("driver_version", of=log),
        cuda=value("cuda_version", of=log),
        name=value("product_name"),
        persistence=value("persistence_mode"),
        mig=value("mig_mode/current_mig"),
        compute_mode=value("compute_mode"),
        ecc=value("ecc_mode/current_ecc"),
        memory_total=value("fb_memory_usage/total"),
        memory_used=value("fb_memory_usage/used"),
        temperature=value("temperature/gpu_temp"),
        clock=value("clocks/sm_clock", "clocks/graphics_clock"),
        application_clock=value("applications_clocks/graphics_clock"),
        max_clock=value("max_clocks/sm_clock", "max_clocks/graphics_clock"),
        memory_clock=value("clocks/mem_clock"),
        max_memory_clock=value("max_clocks/mem_clock"),
        power_limit=value(*(f"{p}/{name}" for p in power for name in ("current_power_limit", "power_limit"))),
        default_power_limit=value(*(f"{p}/default_power_limit" for p in power)),
        reasons=tuple(dict.fromkeys(reasons)),
    )


def problems(f: Facts, smi: Smi | None) -> list[Problem]:
    """Every mismatch, the fatal ones first. If torch sees no GPU, only the reason for that."""
    if f.missing:
        lacks = f"{f.executable} lacks {', '.join(f.missing)}: install it, or name another interpreter with PYTHON=..."
        return [Problem(lacks, True)]
    if not f.available:
        return [Problem(_unseen(f, smi), True)]
    found = [*_commit(f), *_versions(f), *_toolchain(f, smi), *_device(f), *_state(smi)]
    return sorted(found, key=lambda p: not p.fatal)


def carried(f: Facts, cache: Path | None) -> list[Problem]:
    """What does not fit in a Triton cache that was carried here (pack.py)."""
    key = f.triton_key if cache is None else (cache / "key").read_text()
    if key == f.triton_key:
        return []
    return [
        Problem(f"{cache} was compiled by another Triton ({key}, here {f.triton_key}): nothing in it will be found")
    ]


def _unseen(f: Facts, smi: Smi | None) -> str:
    """Why torch sees no GPU."""
    torch = f"torch {f.versions.get('torch')}"
    driver = f.driver_cuda or (smi.cuda if smi is not None else None)
    if smi is None and driver is None:
        return f"there is no NVIDIA GPU or driver here ({torch} sees no device); `make test` needs none"
    if f.torch_cuda is None and f.hip is None:
        return f"{torch} is a build for CPUs: install a build for CUDA {_major(driver)} (pytorch.org/get-started)"
    if f.torch_cuda is not None and driver is not None and _number(f.torch_cuda)[0] > _number(driver)[0]:
        return (
            f"{torch} was built for CUDA {f.torch_cuda} and the driver supports CUDA {driver}: install driver "
            f"{DRIVER_13} or newer, or a torch for CUDA {_major(driver)}"
        )
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        shown = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"{torch} sees no device with CUDA_VISIBLE_DEVICES={shown!r}: unset it, or name a GPU that exists"
    return (
        f"{torch} sees no device{f' ({f.torch_says})' if f.torch_says else ''}: run nvidia-smi and restart the driver"
    )


def _commit(f: Facts) -> Iterator[Problem]:
    if f.commit.endswith("+"):
        yield Problem(
            f"files differ from commit {f.commit[:-1]}, so rows name {f.commit}: they are no results to publish"
        )
    if f.commit == "unknown":
        yield Problem("the commit is unknown, so no row can name it: run in a checkout, with git")


def _versions(f: Facts) -> Iterator[Problem]:
    for name, least in f.required.items():
        have = f.versions.get(name)
        if have is not None and _number(have) < _number(least):
            yield Problem(f"{name} {have} is older than {least}, the least that specker runs with: upgrade it", True)
    triton, pinned = f.versions.get("triton"), _number(f.pinned_triton or "")
    if triton is not None and _number(triton)[: len(pinned)] != pinned:
        yield Problem(
            f"Triton {triton} is installed, and torch {f.versions.get('torch')} was released with {f.pinned_triton}: "
            f"baselines that use torch.compile may fail; pip install triton=={f.pinned_triton} if they do"
        )


def _toolchain(f: Facts, smi: Smi | None) -> Iterator[Problem]:
    if f.compiler is None and not os.environ.get("CC"):
        yield Problem("there is no C compiler, with which Triton builds its launcher: apt-get install gcc", True)
    if not f.headers:
        python = ".".join((f.versions.get("python") or "3").split(".")[:2])
        yield Problem(f"Python.h is missing, with which Triton builds its launcher: install python{python}-dev", True)
    driver = f.driver_cuda or (smi.cuda if smi is not None else None)
    if f.ptxas is not None and driver and _number(f.ptxas[1])[0] > _number(driver)[0]:
        older = [tool for tool in f.assemblers.values() if _number(tool[1])[0] <= _number(driver)[0]]
        name = next((name for name, tool in f.assemblers.items() if tool[0] == f.ptxas[0]), "ptxas").upper()
        use = f"set TRITON_{name}_PATH={older[0][0]} (CUDA {older[0][1]})" if older else "use an older Triton"
        yield Problem(
            f"Triton assembles code for this GPU with ptxas of CUDA {f.ptxas[1]}, which the driver's CUDA {driver} "
            f"refuses: install driver {DRIVER_13} or newer, or {use}",
            True,
        )


def _device(f: Facts) -> Iterator[Problem]:
    if f.capability is not None and f.hip is None and f.capability < (8, 0):
        number = ".".join(map(str, f.capability))
        yield Problem(f"{f.name} has compute capability {number}, and the kernels need 8.0: use a newer GPU", True)
    if 0 < f.memory < 20 * GIB:
        size = f"{f.memory / GIB:.0f} GiB of memory"
        yield Problem(f"{f.name} has {size}: cases of the 8B and 32B shapes do not fit and become rows with a reason")
    if f.devices > 1:
        yield Problem(f"torch sees {f.devices} GPUs and the first is used: choose with CUDA_VISIBLE_DEVICES")


def _state(smi: Smi | None) -> Iterator[Problem]:
    if smi is None:
        yield Problem("there is no nvidia-smi: clocks, power and other processes are not checked")
        return
    if smi.compute_mode == "Prohibited":
        yield Problem(f"the GPU's compute mode is Prohibited: {OWN} -c DEFAULT", True)
    if smi.compute_mode == "Exclusive_Process":
        yield Problem(f"only one process may use the GPU at a time, so parallel tests fail: {OWN} -c DEFAULT")
    if smi.mig == "Enabled":
        yield Problem("MIG is on, so this is a slice of a GPU: times and bandwidth are the slice's")
    if smi.persistence == "Disabled":
        yield Problem(f"persistence mode is off, so the first launch of each process is slow: {OWN} -pm 1")
    slow = [reason for reason in smi.reasons if re.search(r"slowdown|thermal|brake", reason)]
    if slow:
        yield Problem(f"the GPU lowers its clocks ({', '.join(slow)}): cool it or check its power supply, then repeat")
    if _lower(smi.application_clock, smi.max_clock):
        yield Problem(
            f"the application clock is {smi.application_clock} of at most {smi.max_clock}: {OWN} -rac resets it"
        )
    if _lower(smi.power_limit, smi.default_power_limit):
        watts = _amount(smi.default_power_limit)
        limits = f"{smi.power_limit} of {smi.default_power_limit}"
        yield Problem(f"the power limit is {limits}, the default: {OWN} -pl {watts:g}")
    used = _amount(smi.memory_used)
    if used is not None and used > 1024:
        yield Problem(f"{smi.memory_used} of the GPU's memory are in use: end other processes, which disturb timings")


def table(f: Facts, smi: Smi | None) -> list[tuple[str, str]]:
    """Names and values for the report."""
    s = smi or Smi()
    ptxas = "" if f.ptxas is None else f"CUDA {f.ptxas[1]} ({f.ptxas[0]})"
    rows = {
        "GPU": f.name or s.name,
        "compute capability": "" if f.capability is None else ".".join(map(str, f.capability)),
        "SMs": str(f.sms or ""),
        "memory": f"{f.memory / GIB:.1f} GiB" if f.memory else s.memory_total,
        "memory in use before": s.memory_used,
        "driver": s.driver,
        "driver's CUDA": f.driver_cuda or s.cuda,
        "torch": f.versions.get("torch"),
        "torch's CUDA": f.torch_cuda or f.hip,
        "Triton": f.versions.get("triton"),
        "Triton that torch pins": f.pinned_triton,
        "ptxas for this GPU": ptxas,
        "Triton's cache": f.cache,
        "specker's kernels are made": "at its import" if f.device_file else "at their first use",
        "Triton's key": f.triton_key,
        "transformers": f.versions.get("transformers"),
        "Python": f.versions.get("python"),
        "SM clock now, application, max": ", ".join(filter(None, (s.clock, s.application_clock, s.max_clock))),
        "memory clock now, max": ", ".join(filter(None, (s.memory_clock, s.max_memory_clock))),
        "reasons for lower clocks": ", ".join(s.reasons) or ("none" if smi is not None else ""),
        "power limit, default": ", ".join(filter(None, (s.power_limit, s.default_power_limit))),
        "temperature": s.temperature,
        "persistence mode": s.persistence,
        "ECC": s.ecc,
        "MIG": s.mig,
        "compute mode": s.compute_mode,
        "commit": f.commit,
    }
    return [(name, value or "unknown") for name, value in rows.items()]


def _number(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) of "2.13.0+cu130"."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def _major(version: str | None) -> str:
    return "" if not version else str(_number(version)[0])


def _amount(text: str) -> float | None:
    """The number in "1980 MHz"."""
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else None


def _lower(value: str, usual: str) -> bool:
    one, other = _amount(value), _amount(usual)
    return one is not None and other is not None and one < other
