"""Each script of bench/, scripts/ and train/ imports and describes its flags; a bench saves rows only when asked to."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_FLAGS = {  # run by others, or they take words
    *("bench/gpu/compiling.py", "bench/gpu/facts.py", "bench/gpu/ops.py"),
    *("bench/llama_server.py", "bench/peer.py", "bench/vllm_engine.py", "scripts/dist.py", "scripts/oldest.py"),
}
SCRIPTS = sorted(
    name
    for folder in ("bench", "scripts", "train")
    for path in (ROOT / folder).rglob("*.py")
    if "\nif __name__ ==" in path.read_text(encoding="utf-8")
    if (name := path.relative_to(ROOT).as_posix()) not in WITHOUT_FLAGS
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_describes_its_flags(script, command_line, capsys):
    if script == "bench/plot.py":
        pytest.importorskip("matplotlib")
    command_line([script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(script.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True)
    said = " ".join(capsys.readouterr().out.split())
    assert not end.value.code and "usage: " in said.lower()
    assert "--save [" not in said or re.search(r"--save \[SAVE\] [^(]+ \(default: False\)", said)
