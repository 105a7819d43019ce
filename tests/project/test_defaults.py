"""torch's global defaults, which an application or another library may set, change no result and no buffer: the ops and
engines allocate what they name, and name all that they allocate."""

import ast
import json
from pathlib import Path

import pytest
import warm
from make_checkpoint import FULL, GEMMA4_MIXED, GEMMA4_PLE, GPT_OSS, PHI4, QWEN3_NEXT, SLIDING, make

from specker import zoo

# What creates a tensor of torch's default dtype or on its default device, unless these are named.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros", "FloatTensor", "Tensor"),
}


def unnamed(source: str) -> list[str]:
    """`line: call` of each allocation that leaves its dtype or its device to torch's defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=named):
                wrong = name in FACTORIES and not {"dtype", "device"} <= {keyword.arg for keyword in named}
            case ast.ImportFrom(module="torch", names=names):  # then it is called by its name alone
                wrong = any(name.name in FACTORIES - {"Tensor"} for name in names)
            case _:
                wrong = False
        if wrong:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_allocation_names_dtype_and_device() -> None:
    package = Path(zoo.__file__).parents[1]
    found = {
        str(path.relative_to(package)): calls
        for path in sorted(package.rglob("*.py"))
        if "torch" in (source := path.read_text()) and (calls := unnamed(source))
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.empty(3, dtype=torch.float32, device=x.device)", []),
        ("x.new_empty(3), torch.empty_like(x), np.empty(3), tl.zeros([1], tl.int32), torch.from_numpy(x)", []),
        ("torch.empty(3)", ["1: torch.empty(3)"]),
        ("torch.zeros(2, torch.arange(3).max(), dtype=int, device=d)", ["1: torch.arange(3)"]),
        ("torch.tensor([1], device=d)", ["1: torch.tensor([1], device=d)"]),
        ("from torch import Tensor", []),
        ("from torch import Tensor, ones as made", ["1: from torch import Tensor, ones as made"]),
        ("torch.rand(2, **given)", ["1: torch.rand(2, **given)"]),
        ("torch.Tensor(3)", ["1: torch.Tensor(3)"]),
    ],
)
def test_the_check_finds_calls(source: str, found: list[str]) -> None:
    assert unnamed(source) == found


@pytest.fixture(scope="module")
def engines(tmp_path_factory, pair):
    """Models and options of each engine: strategies, layers and sizes of numbers whose code differs."""
    folder = tmp_path_factory.mktemp("defaults")
    code, fixed = ["code-target"], {"policy": "fixed", "draft_tokens": 3}
    ple = make(folder / "ple", **GEMMA4_PLE | {"max_context": 192, "tied": False})
    return {
        "hybrid": (["hybrid-target"], {}),
        "vocabtrim+lookup": (code, {"batch_size": 2}),
        "del": (code, {"strategy": "del", "quantize": "int8"}),
        "diffuspec": (code, {"strategy": "diffuspec", "kv_dtype": "int8"}),
        "chat": (pair, {"strategy": "draft", "dtype": "bfloat16", **fixed}),
        "gemma4, a table for each layer": ([str(ple)], {"strategy": "lookup", **fixed}),
    }


@pytest.fixture(scope="module")
def more_engines(tmp_path_factory, heads, pair):
    folder = tmp_path_factory.mktemp("defaults")
    code, fixed = ["code-target"], {"policy": "fixed", "draft_tokens": 3}
    two = {"layers": 2, "layer_types": [SLIDING, FULL], "tied": False}
    kinds = {"gpt-oss": GPT_OSS | two, "gemma4": GEMMA4_MIXED | two, "qwen3-next": QWEN3_NEXT, "longrope": PHI4}
    found = {name: ([str(make(folder / name, **how))], {"strategy": "lookup", **fixed}) for name, how in kinds.items()}
    for strategy, layout in (("eagle", "flat"), ("mtp", "mimo"), ("dflash", "dspark"), ("dflash", "domino")):
        head = heads(strategy, layout)
        models = [str(path) for path in (head.target, head.folder) if path is not None]
        found[f"{strategy}, {layout}"] = models, {"strategy": strategy, **fixed}
    return found | {
        "hybrid, ar": (["hybrid-target"], {"strategy": "ar"}),
        "tree": (code, {"strategy": "draft", "tree": "3x3"}),
        "easyspec": (code, {"strategy": "easyspec", **fixed}),
        "int4": (code, {"strategy": "lookup", "quantize": "int4"}),
        "chat in float64": (pair, {"strategy": "draft", "dtype": "float64", **fixed}),
        "random weights": (pair[:1], {"strategy": "ar", "load": "dummy"}),
    }


def compare(engines, *defaults: str) -> None:
    script, names = "tests/support/defaults.py", ("usual", *defaults)
    runs = warm.beside(*(([script, name, json.dumps(engines)], {}) for name in names))
    for run in runs:
        assert run.returncode == 0, run.stderr
    usual, *others = ([json.loads(line) for line in run.stdout.splitlines()] for run in runs)
    assert len(usual) > 4 * len(engines) + 40
    for name, lines in zip(defaults, others, strict=True):
        for (op, what, logprobs), got in zip(usual, lines, strict=True):
            assert got == [op, what, pytest.approx(logprobs, abs=1e-4)], (name, op)


def test_no_result_depends_on_torchs_defaults(engines) -> None:
    compare(engines, "float64 on meta")


@pytest.mark.slow
def test_nor_on_each_alone(engines, more_engines) -> None:
    compare(engines | more_engines, "float64", "bfloat16", "meta")
