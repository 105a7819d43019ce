#!/usr/bin/env bash
# `make gpu`: every gpu-marked test, then every bench, on this machine's own python3. Installs nothing. PYTHON and
# arguments (passed to the end-to-end bench) may be given; results go to bench/results/<gpu>/.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=.

"$python" - <<'PY' || exit 1
import importlib, sys

missing = []
for name in ("torch", "triton", "transformers", "safetensors", "rich", "pytest"):
    try:
        importlib.import_module(name)
    except ImportError:
        missing.append(name)
if missing:
    sys.exit(f"make gpu: {sys.executable} lacks {', '.join(missing)}; name another interpreter with PYTHON=...")
import torch

if not torch.cuda.is_available():
    sys.exit(f"make gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device; `make test` needs none")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, python {sys.version.split()[0]}")
PY

failed=0
"$python" -m pytest -p no:cacheprovider -m gpu tests
code=$?
if [ $code -eq 5 ]; then echo "no test carries the gpu marker yet"; elif [ $code -ne 0 ]; then failed=1; fi

for bench in bench/kernels/bench_*.py; do
  if [ -e "$bench" ]; then "$python" "$bench" || failed=1; fi
done
"$python" bench/decode.py || failed=1
"$python" bench/e2e.py --device cuda --dtype bfloat16 "$@" || failed=1
"$python" bench/plot.py "$("$python" -c 'from bench import harness; print(harness.folder("cuda"))')" || failed=1
[ $failed -eq 0 ] || echo "make gpu: something above failed" >&2
exit $failed
