"""The built machine code: tensor products and tensor copies are there, no register is spilled."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sysconfig

import pytest

from mok_megatron.backends import library


def cuobjdump() -> str | None:
    wheels = pathlib.Path(sysconfig.get_paths()["purelib"])
    found = [*wheels.glob("nvidia/*/bin/cuobjdump"), *wheels.glob("triton/**/bin/cuobjdump")]
    return shutil.which("cuobjdump") or next((str(path) for path in found), None)


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """Mangled name -> machine code, of every grouped product."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump, found none")
    if not library.LIBRARY.is_file():
        pytest.skip(f"needs the CUDA library, found no {library.LIBRARY.name}")
    dump = [tool, "--dump-sass", str(library.LIBRARY)]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)", text, flags=re.MULTILINE)
    functions = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name: code for name, code in functions.items() if "grouped_gemm" in name}


def test_every_product_is_there(kernels: dict[str, str]) -> None:
    assert len(kernels) >= 10  # 2 plain x 2 tilings, up x 2, down_gradient x 2, 4 weight gradients


def test_products_run_on_the_tensor_cores(kernels: dict[str, str]) -> None:
    for name, code in kernels.items():
        assert "HGMMA.64x" in code, name
        assert not re.search(r"\bHMMA\b", code), name


def test_operands_come_by_tensor_copies(kernels: dict[str, str]) -> None:
    for name, code in kernels.items():
        assert "UTMALDG" in code, name
        assert "UTMASTG" in code, name


DIRECTIONS = ("Forward", "Backward")  # kernels of several passes


def is_direction(name: str) -> bool:
    return any(direction in name for direction in DIRECTIONS)


def test_both_directions_are_there(kernels: dict[str, str]) -> None:
    found = [sum(name in kernel for kernel in kernels) for name in DIRECTIONS]
    assert found == [2, 8]  # one rank or several; backward: fp32 or bf16, added or written


def test_no_kernel_has_local_memory(kernels: dict[str, str]) -> None:
    for name, code in kernels.items():
        assert not re.search(r"\b(LDL|STL)\b", code), f"{name} spills registers"
    tool = cuobjdump()
    assert tool is not None
    dump = [tool, "--dump-resource-usage", str(library.LIBRARY)]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    stacks = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+)", text)
    assert len(stacks) > len(kernels)
    assert [name for name, stack in stacks if int(stack) > 0] == []


def test_registers_are_given_and_taken(kernels: dict[str, str]) -> None:
    for name, code in kernels.items():
        assert "USETMAXREG.DEALLOC" in code, name
        assert "USETMAXREG.TRY_ALLOC" in code, name


def test_limits_are_of_a_clock_that_never_stands_still(kernels: dict[str, str]) -> None:
    """An SM's own does, while another process has the GPU."""
    for name, code in kernels.items():
        assert "SR_GLOBALTIMER" in code, name
        assert "SR_CLOCK" not in code, name
