"""The public functions, with kernels of a user."""

import ast
import graphlib
import re
import sys

import pytest
from command import ROOT, python

KERNEL = """
import torch, triton, triton.language as tl
import ptxsim

@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n) * 2, mask=o < n)

x, y = torch.arange(100.0), torch.empty(100)
"""


PROGRAMS = {  # run after KERNEL
    **{
        f"sm_{arch}": f"""
simulation = ptxsim.simulate(double_kernel, (2,), x, y, 100, arch={arch}, BLOCK=64, num_warps=2)
print(dict(simulation.problems()), torch.equal(y, 2 * x))
print(simulation)
"""
        for arch in (80, 90)
    },
    "cases": """
def case(n, want):
    def work():
        double_kernel[(2,)](x, y, n, BLOCK=64)
        return y
    return ptxsim.Case("double", work, lambda verdict, got: verdict.same("y", got, want))

print(case(100, 2 * x).verdict(ptxsim.simulated(90)).wrong)
print(case(100, 3 * x).verdict(ptxsim.simulated(90)).wrong)
print(*case(101, 2 * x).verdict(ptxsim.simulated(90)).wrong, sep="; ")
""",
    "prefetches": """
from triton.language.extra.cuda import gdc_wait

@triton.jit
def ahead_kernel(x_ptr, STRIDE: tl.constexpr):
    address = (x_ptr + tl.arange(0, 32) * STRIDE).to(tl.int64, bitcast=True)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)
    gdc_wait()

x = torch.zeros(1024)
for stride, constant in ((32, {"x_ptr"}), (16, {"x_ptr"}), (32, ()), (34, {"x_ptr"})):
    s = ptxsim.simulate(ahead_kernel, (2,), x, STRIDE=stride, constant=constant, num_warps=1, launch_pdl=True)
    print(s.launches[0].report.prefetched, *s.problems())
""",
    "constants": """
for constant in ({"x_ptr"}, {"z_ptr"}):
    try:
        print(dict(ptxsim.simulate(double_kernel, (2,), x, y, 100, constant=constant, BLOCK=64).problems()))
    except ValueError as error:
        print(error)
""",
}
END = "-- the next program"
README = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that each program prints, and the README's. One process runs them all, since its imports take longer,
    from files, from which Triton reads a kernel's source."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {name: KERNEL + text for name, text in PROGRAMS.items()} | {"readme": README}
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    each = f"print({END!r}); runpy.run_path(f'{{sys.argv[1]}}/{{name}}.py')"
    parts = python("-c", f"import runpy, sys\nfor name in {[*programs]}: {each}", str(folder)).split(f"{END}\n")
    return {name: part.splitlines() for name, part in zip(programs, parts[1:], strict=True)}


@pytest.mark.parametrize("arch", [80, 90])
def test_a_kernel_computes_and_has_no_problems(printed: dict[str, list[str]], arch: int) -> None:
    problems, counters, *_ = printed[f"sm_{arch}"]
    assert problems == "{} True"
    assert counters.startswith("  double_kernel grid (2,) 2 warps 0 B: reads 0.4 KB")


def test_a_case_counts_wrong_values_and_problems(printed: dict[str, list[str]]) -> None:
    right, other, beyond = printed["cases"]
    assert right == "[]" and other == "['y: 99 of 100 differ']"
    kinds = re.findall(r"\d+ x double_kernel: global (read|write) of 4 bytes out of bounds", beyond)
    assert sorted(kinds) == ["read", "write"]


def test_prefetched_lines_are_counted_and_checked(printed: dict[str, list[str]]) -> None:
    whole, half, early, beyond = printed["prefetches"]
    assert (whole, half) == ("4096", "2048")
    assert "ahead_kernel: reads storage of (1024,) torch.float32 byte 0 of 4096 before griddepcontrol.wait" in early
    assert "ahead_kernel: prefetch out of bounds: " in beyond


def test_constants_must_be_parameters(printed: dict[str, list[str]]) -> None:
    assert printed["constants"] == ["{}", "expected parameters of double_kernel, got the constants ['z_ptr']"]


def test_the_readme_runs(printed: dict[str, list[str]]) -> None:
    """What its code prints follows in comments, some cut short by "..."."""
    shown = re.findall(r"^# (.*)$", README, re.MULTILINE)
    assert len(printed["readme"]) == len(shown) > 0
    for line, beginning in zip(printed["readme"], shown, strict=True):
        assert line == beginning or (beginning.endswith("...") and line.startswith(beginning[:-3])), line


def test_the_package_needs_numpy_torch_and_triton_alone() -> None:
    for path in (ROOT / "ptxsim").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {name.split(".")[0] for name in names}
            assert tops <= {"ptxsim", "numpy", "torch", "triton", *sys.stdlib_module_names}, path


def test_no_files_import_each_other() -> None:
    """Imports for types count."""
    needs: dict[str, set[str]] = {}
    for path in (ROOT / "ptxsim").glob("*.py"):
        needs[path.stem] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "ptxsim":
                needs[path.stem] |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ptxsim."):
                needs[path.stem].add(str(node.module).split(".")[1])
    graphlib.TopologicalSorter(needs).prepare()  # CycleError names the files
