"""How facts are gathered: probes that hang or die, the library's file, a container's limits."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest

from mok_megatron.doctor import probes
from mok_megatron.doctor.finding import GIB
from mok_megatron.doctor.machine import PACKAGE, arches, ask, gather

# Probes that hang or die; the child finds these functions by name.


def probe_hangs(report: probes.Report) -> None:
    report.facts(torch_version="1")
    with report.step("waiting for ever"):
        signal.pause()


def probe_dies(report: probes.Report) -> None:
    with report.step("reading address zero"):
        report.facts(apex=True)
        os.kill(os.getpid(), signal.SIGSEGV)


def probe_raises(report: probes.Report) -> None:
    print("a library's noise on stdout")
    with report.step("first"):
        raise ValueError("no")
    with report.step("second"):
        report.facts(apex=True)
    raise KeyError("outside every step")


def probe_variables(report: probes.Report) -> None:
    report.facts(environment=dict(os.environ))


def test_no_probe_may_make_a_multicast_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    facts, faults = ask(f"{__name__}:probe_variables", 60.0)
    assert not faults
    assert facts["environment"]["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert facts["environment"]["NCCL_NVLS_ENABLE"] == "0"


def test_a_probe_that_hangs_is_ended_and_named() -> None:
    start = time.monotonic()
    facts, faults = ask(f"{__name__}:probe_hangs", 20.0)
    assert facts == {"torch_version": "1"}
    assert faults == {"waiting for ever": "no answer within 20 s"}
    assert time.monotonic() - start < 40


def test_a_probe_that_dies_leaves_its_facts() -> None:
    facts, faults = ask(f"{__name__}:probe_dies", 60.0)
    assert facts == {"apex": True}
    assert faults == {"reading address zero": "died of signal SIGSEGV"}


def test_an_exception_ends_a_step_or_names_the_last() -> None:
    facts, faults = ask(f"{__name__}:probe_raises", 60.0)
    assert facts == {"apex": True}
    assert faults["first"] == "ValueError: no"
    assert faults["second"] == "exit code 1: KeyError: 'outside every step'"


def _fat_binary(*entries: tuple[int, int]) -> bytes:
    """(kind, arch) of each entry, behind a header."""
    body = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, 24) + bytes(12) + struct.pack("<I", arch) + bytes(56)
        for kind, arch in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def _elf(section: bytes) -> bytes:
    """An ELF file of two sections: .nv_fatbin and the names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start = 64 + 3 * 64
    headers = bytes(64)
    for name, offset, size in ((1, start, len(section)), (12, start + len(section), len(names))):
        headers += struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size) + bytes(24)
    head = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", 64) + bytes(10)
    return head + struct.pack("<HHH", 64, 3, 2) + headers + section + names


def test_the_architectures_of_a_library() -> None:
    two = _fat_binary((2, 90)) + bytes(8) + _fat_binary((2, 80), (1, 90))
    assert arches(_elf(two)) == ("sm_80", "compute_90", "sm_90")
    assert arches(_elf(b"")) == ()


@pytest.mark.parametrize(
    "content",
    [b"", b"no ELF file", _elf(_fat_binary((2, 90)))[:150], _elf(b"\xff" * 64)],
    ids=["empty", "text", "cut off", "other code"],
)
def test_a_file_that_is_no_library_raises_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"ELF|fat binary"):
        arches(content)


def test_the_built_library_is_read_as_cuobjdump_reads_it() -> None:
    path = PACKAGE / "_C.abi3.so"
    found = [pathlib.Path(p) / "nvidia/cu13/bin/cuobjdump" for p in sys.path]
    tool = shutil.which("cuobjdump") or next((str(p) for p in found if p.is_file()), None)
    if not path.is_file() or tool is None:
        pytest.skip(f"needs a built library and cuobjdump, found {path.is_file()} and {tool}")
    listed = subprocess.run(
        [tool, "-lelf", str(path)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    names = {line.split(".")[-2].rstrip("af") for line in listed.splitlines() if "cubin" in line}
    assert set(arches(path.read_bytes())) == names


def test_where_nothing_is_to_be_read_nothing_is_known(tmp_path: pathlib.Path) -> None:
    machine = gather(0.001, tmp_path)
    assert (machine.own_namespaces, machine.imex_channels, machine.imex_service) == (
        None,
        (),
        False,
    )
    assert not [step for step in machine.faults if step.startswith("looking at")]


def test_limits_are_read_from_the_files_of_a_container(tmp_path: pathlib.Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n",
        "proc/self/status": "Name: x\nCapEff:\t0000000000080000\n",
        "proc/sys/kernel/yama/ptrace_scope": "2\n",
        "sys/fs/cgroup/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/bus/pci/devices/0000:00:01.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:00:01.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:00:02.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:00:02.0/class": "0x068000\n",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "dev/infiniband/uverbs0": "",
        "dev/nvidia-caps-imex-channels/channel0": "",
        "dev/nvidia-caps-imex-channels/channel12": "",
        "proc/1/comm": "systemd\n",
        "proc/77/comm": "nvidia-imex\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    spaces = tmp_path / "proc/self/ns"
    spaces.mkdir()
    for name, number in {"pid": 4026532000, "ipc": 4026531839}.items():
        (spaces / name).symlink_to(f"{name}:[{number}]")
    machine = gather(0.001, tmp_path)  # and no probe has the time to say anything
    assert machine.host_bytes == 2 * GIB
    assert (machine.ptrace_scope, machine.may_ptrace) == (2, True)
    assert (machine.pci_gpus, machine.device_nodes, machine.infiniband) == (1, 1, True)
    assert machine.shm_bytes is None
    assert (machine.imex_channels, machine.imex_service) == ((0, 12), True)
    assert machine.own_namespaces == ("pid",)
    assert "no answer within 0.001 s" in machine.faults["starting the driver probe"]
    assert machine.python == sys.version_info[:2]
