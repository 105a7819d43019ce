"""The environment of a process that runs as on an older processor. Each library that chooses its code by the processor
has a switch of its own; a new one gets its line here. The whole suite on such a processor:

    env $(PYTHONPATH=tests python -m processors) python -m pytest
"""

# An x86-64 processor of 2013: vectors of 256 bits, neither AVX-512 nor products of bfloat16 or int8.
OLDER = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # torch's products in bfloat16 and its prepacked ones
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # torch's other products, on Intel's processors
    "SPECKER_CPU": "avx2",  # specker/cpu
    "OPENBLAS_CORETYPE": "Haswell",  # numpy's products
    "NPY_DISABLE_CPU_FEATURES": "X86_V4,AVX512_ICL,AVX512_SPR",  # numpy's loops
}

if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in OLDER.items()))
