#!/usr/bin/env bash
# `make gpu`: every gpu-marked test, then every bench, on this machine's own python3. Installs nothing. Results go to
# bench/results/<gpu>/. To be given: PYTHON, arguments for the end-to-end bench, PARTS (some of the list below, or
# "ablations", each strategy's own bench, which takes longer) and WITHIN, the seconds that it may take: bench/decode.py,
# whose cases with goals come first, gets what the rest left.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
parts=${PARTS:-tests kernels e2e decode plot}
within=${WITHIN:-540}
export PYTHONPATH=.

for part in $parts; do
  case $part in
    tests | kernels | e2e | decode | plot | ablations) ;;
    *) echo "make gpu: PARTS are tests, kernels, e2e, decode, plot and ablations, not $part" >&2; exit 2 ;;
  esac
done

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

# In as many processes as there are cores, up to 8, since most of the time goes into compiling kernels; what times
# something runs after them, alone.
tests() {
  local count logs i code failed=0 pids=()
  count=$(nproc)
  [ "$count" -le 8 ] || count=8
  logs=$(mktemp -d)
  for ((i = 0; i < count; i++)); do
    "$python" -m pytest -q -p no:cacheprovider -m "gpu and not alone" --part "$i/$count" tests >"$logs/$i" 2>&1 &
    pids+=($!)
  done
  for ((i = 0; i < count; i++)); do
    wait "${pids[$i]}"
    code=$?
    if [ $code -eq 0 ]; then tail -n 1 "$logs/$i"; elif [ $code -ne 5 ]; then failed=1; cat "$logs/$i"; fi  # 5: no test
    grep -h "turned by rounding" "$logs/$i"
  done
  rm -r "$logs"
  "$python" -m pytest -q -p no:cacheprovider -m "gpu and alone" tests || failed=1
  return $failed
}

kernels() {
  local bench failed=0
  for bench in bench/kernels/bench_*.py; do "$python" "$bench" || failed=1; done
  return $failed
}

e2e() { "$python" bench/e2e.py --device cuda --dtype bfloat16 "$@"; }

decode() {
  local left=$((within - SECONDS - 45))  # a case that has begun ends, and then there are pictures
  "$python" bench/decode.py --seconds $((left > 30 ? left : 30))
}

ablations() {
  local name failed=0
  for name in easyspec vocabtrim diffuspec dynamic_exit; do
    "$python" "bench/$name.py" --device cuda --dtype bfloat16 || failed=1
  done
  return $failed
}

plot() { "$python" bench/plot.py "$("$python" -c 'from bench import harness; print(harness.folder("cuda"))')"; }

failed=""
for part in $parts; do
  begun=$SECONDS
  "$part" "$@" || failed+=" $part"
  echo "make gpu: $part took $((SECONDS - begun)) s"
done
[ -z "$failed" ] || echo "make gpu: failed:$failed" >&2
[ -z "$failed" ]
