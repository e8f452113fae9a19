"""The driver, played by an object; and a pattern that is lost on its way."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
from typing import Any

import pytest
import torch

from mok_megatron.doctor import probes
from mok_megatron.doctor.finding import GIB


class Driver:
    """libcuda and libnvidia-ml of two GPUs, of which GPU 1 has no atomics on GPU 0."""

    def __init__(self, error: int = 0, mig: bool = False) -> None:
        self.error, self.mig = error, mig

    def __call__(self, name: str) -> Driver:
        assert name in ("libcuda.so.1", "libnvidia-ml.so.1")
        return self

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 12090
        return 0

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    nvmlDeviceGetCount_v2 = cuDeviceGetCount

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, out: Any, size: int, device: int) -> int:
        out.value = b"NVIDIA H100"
        return 0

    def cuDeviceGetPCIBusId(self, out: Any, size: int, device: int) -> int:
        out.value = b"0000:0%d:00.0" % device
        return 0

    def cuDeviceGetAttribute(self, out: Any, which: int, device: int) -> int:
        known = {75: 9, 76: 0}
        out._obj.value = known.get(which, 0)
        return 0 if which in known else 1

    def cuDeviceTotalMem_v2(self, out: Any, device: int) -> int:
        out._obj.value = 80 * GIB
        return 0

    def cuDeviceCanAccessPeer(self, out: Any, device: int, peer: int) -> int:
        out._obj.value = 1
        return 0

    def cuDeviceGetP2PAttribute(self, out: Any, which: int, device: int, peer: int) -> int:
        assert which == 3
        out._obj.value = device == 0
        return 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, out: Any, size: int) -> int:
        out.value = b"575.51.03"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, which: Any, out: Any) -> int:
        out._obj.value = 1
        return 0

    nvmlDeviceGetHandleByPciBusId_v2 = nvmlDeviceGetHandleByIndex_v2

    def nvmlDeviceGetMigMode(self, handle: Any, now: Any, pending: Any) -> int:
        assert isinstance(handle, ctypes.c_void_p)
        now._obj.value = self.mig
        return 0


def _asked(load: Any) -> tuple[dict[str, Any], dict[str, str]]:
    stream = io.StringIO()
    probes.ask_driver(probes.Report(stream), load)
    facts: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for kind, value in map(json.loads, stream.getvalue().splitlines()):
        if kind != "step":
            (facts if kind == "facts" else faults).update(value)
    return facts, faults


def test_the_driver_is_read_as_it_answers() -> None:
    facts, faults = _asked(Driver())
    assert not faults
    assert facts["driver_version"] == "575.51.03"
    assert facts["driver_cuda"] == [12, 9]
    assert facts["devices"] == 2 * [
        {
            "name": "NVIDIA H100",
            "capability": [9, 0],
            "memory_bytes": 80 * GIB,
            "multicast": False,
            "mig": False,
            "nvlink_domain": None,
        }
    ]
    assert [(p["rank"], p["peer"], p["access"], p["atomics"]) for p in facts["pairs"]] == [
        (0, 1, True, True),
        (1, 0, True, False),
    ]


def test_the_driver_refuses_hides_or_is_not_there() -> None:
    facts, faults = _asked(Driver(error=802))
    assert (facts["driver"], facts["driver_error"], faults) == (True, 802, {})
    facts, _ = _asked(Driver(mig=True))
    assert facts["mig_without_instances"]
    assert all(device["mig"] for device in facts["devices"])

    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert _asked(absent) == ({"driver": False}, {})


@pytest.mark.parametrize(
    ("error", "cluster", "domain"),
    [
        pytest.param(0, b"\x0a" + bytes(14) + b"\x01", f"0a{28 * '0'}01.5", id="NVL72"),
        pytest.param(0, bytes(16), None, id="one host"),
        pytest.param(3, b"\x0a" * 16, None, id="not supported"),
    ],
)
def test_a_domain_is_read_where_nvlink_goes_beyond_the_host(
    error: int, cluster: bytes, domain: str | None
) -> None:
    driver = Driver()

    def fabric(handle: Any, out: Any) -> int:
        out._obj.cluster[:], out._obj.clique, out._obj.state = cluster, 5, 3
        return error

    driver.nvmlDeviceGetGpuFabricInfo = fabric  # type: ignore[attr-defined]
    facts, faults = _asked(driver)
    assert not faults
    assert [device["nvlink_domain"] for device in facts["devices"]] == [domain, domain]


def test_a_driver_that_fails_half_way_leaves_what_was_known() -> None:
    broken = Driver()
    broken.cuDeviceGetCount = lambda out: 999  # type: ignore[method-assign]
    facts, faults = _asked(broken)
    assert facts["driver_error"] == 0
    assert "devices" not in facts
    assert "returned error 999" in faults["listing the devices"]


def test_a_pattern_that_changes_names_its_pair() -> None:
    def loses(pattern: torch.Tensor, a: int, b: int) -> torch.Tensor:
        return torch.zeros_like(pattern) if (a, b) == (2, 1) else pattern

    def swaps(pattern: torch.Tensor, a: int, b: int) -> torch.Tensor:
        return pattern + 1 if a != b else pattern  # as if another pair's pattern arrived

    seen = []

    def keeps(pattern: torch.Tensor, a: int, b: int) -> torch.Tensor:
        seen.append((a, b, int(pattern[0])))
        return pattern

    assert probes.wrong_pairs(3, keeps) == ""
    assert {(a, b) for a, b, _ in seen} == set(itertools.product(range(3), repeat=2))
    assert len({first for *_, first in seen}) == 9  # no pair's pattern can pass for another's
    assert probes.wrong_pairs(3, loses) == "a pattern came back changed over GPU 2 to 1"
    assert probes.wrong_pairs(2, swaps).endswith("0 to 1, 1 to 0")
