"""scripts/hub_kernel.py: Hugging Face's `kernels` loads the ops from the folder that it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import hub_kernel
from specker.kernels import accept_walk, ancestor_words, kv_commit, sample_rows, tree_attention, vocab_topk

kernels = pytest.importorskip("kernels", "0.17", reason="Hugging Face's `kernels` 0.17 is not installed")

# Runs where specker cannot be imported, without the paths and variables of this process.
ALONE = """
import sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "specker":
            raise ModuleNotFoundError(f"{name} must not be imported")

sys.meta_path.insert(0, Absent())
import kernels
import torch
import triton
from triton.backends.compiler import GPUTarget

out = Path(sys.argv[1])
hub = kernels.get_local_kernel(out)
inputs = torch.load(out / "inputs.pt")
results = {name: getattr(hub, name)(*args) for name, args in inputs.items()}
results["kv_commit"] = inputs["kv_commit"][:2]
torch.save(results, out / "results.pt")

variants = sys.modules[f"{hub.__name__}.accept_walk"].variants(90)
variant = next(v for v in variants if v.smoke)
types = dict(zip(variant.kernel.arg_names, variant.arguments)) | {name: "constexpr" for name in variant.constants(90)}
source = triton.compiler.ASTSource(variant.kernel, types, dict(variant.constants(90)))
done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=variant.compile_options(90))
print(len(done.asm["cubin"]), *(name for name in sys.modules if name.split(".")[0] == "specker"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "kernel"
    hub_kernel.write(out)
    return out


def inputs() -> dict[str, tuple]:
    """Arguments of some ops: a tree of five rows over seven columns, a trimmed head, sampling."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    parents = torch.tensor([0, 0, 1, 3])
    words = ancestor_words(parents)
    q, caches = normal(5, 4, 16), (normal(3, 4, 2, 16), normal(3, 4, 2, 16))
    tokens, target = torch.tensor([4, 9, 2, 8]), torch.tensor([4, 2, 0, 8, 1])
    positions = torch.arange(5)
    return {
        "ancestor_words": (parents,),
        "tree_attention": (q, *caches, numbers(2, 0)[None], numbers(7), numbers(5), numbers(0, 5), words, 0.25),
        "vocab_topk": (normal(5, 32), normal(40, 32), torch.arange(100, 140), 3, None, (7, positions, 0.7)),
        "accept_walk": (tokens, parents, target),
        "sample_rows": (normal(5, 40), 0.8, 10, 0.9, 7, positions),
        "kv_commit": (normal(2, 3, 4, 2, 16), normal(2, 3, 4, 2, 16), torch.tensor([4, 7]), torch.tensor([3, 4])),
    }


OPS = (ancestor_words, tree_attention, vocab_topk, accept_walk, sample_rows, kv_commit)


def expected() -> dict:
    results = {}
    for op in OPS:
        args = inputs()[op.__name__]
        results[op.__name__] = op(*args)
        if op is kv_commit:
            results["kv_commit"] = args[:2]
    return results


def equal(one, other) -> bool:
    """Floats within rounding: beside specker the noise is compiled, alone torch's logarithms make it."""
    if isinstance(one, torch.Tensor):
        return torch.allclose(one, other, 1e-5, 1e-6) if one.is_floating_point() else torch.equal(one, other)
    return len(one) == len(other) and all(map(equal, one, other))


def test_loads_without_specker(folder):
    """The ops give specker's results, and Triton compiles a kernel of the folder."""
    torch.save(inputs(), folder / "inputs.pt")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-I", "-B", "-c", ALONE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    size, *modules = done.stdout.split()
    assert int(size) > 1000 and modules == []
    results = torch.load(folder / "results.pt")
    wanted = expected()
    assert results.keys() == wanted.keys()
    assert [name for name in wanted if not equal(results[name], wanted[name])] == []


def test_loads_beside_specker(folder):
    """Its ops have a namespace of their own, also in a graph of torch.compile."""
    hub = kernels.get_local_kernel(folder)
    assert hub.accept_walk is not accept_walk and sorted(hub.__all__) == sorted(sys.modules["specker.kernels"].__all__)
    targets = []

    def record(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda *args: hub.accept_walk(*args), fullgraph=True, backend=record)
    args = inputs()["accept_walk"]
    assert equal(compiled(*args), accept_walk(*args))
    assert f"{hub.__name__}.accept_walk.default" in targets and not any(name.startswith("specker.") for name in targets)


def test_metadata_and_project_are_valid(folder):
    """By the parsers of `kernels` itself, which kernel-builder uses too."""
    from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

    ids = set()
    for backend in ("cpu", "cuda"):
        variant = folder / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        written = json.loads((variant / "metadata.json").read_text())
        assert str(metadata.name) == "specker" and written["backend"] == {"type": backend}
        files = written["digest"]["files"].keys()
        assert files == {path.name for path in variant.glob("*.py")} >= {"__init__.py", "_ops.py", "tree_attention.py"}
        ids.add(metadata.id)
    assert len(ids) == 2
    fresh = folder.parent / "fresh"  # without the bytecode of the other tests
    hub_kernel.write(fresh)
    variant = fresh / "build" / "torch-cuda"
    Metadata.read_from_file(variant / "metadata.json").digest.validate(
        Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    )
    assert [str(backend) for backend in Build.open(fresh).general.backends] == list(hub_kernel.BACKENDS)
    source = {path.name: path.read_text() for path in (fresh / "torch-ext" / "specker").iterdir()}
    assert source == {name: (variant / name).read_text() for name in source}
    assert "_ops.py" not in source


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be an empty folder"):
        hub_kernel.write(tmp_path)
