"""`make gpu`: what to run first on a machine with a GPU, in nine or twenty minutes, with one report at the end.

    __main__.py    the parts in turn, each within its share of the time
    parts.py       the commands of each part
    preflight.py   what this machine, its driver, torch and Triton are, and which of it does not fit together
    facts.py       the process that asks torch and Triton
    smoke.py       every op, then decoding with and without dependent launches and CUDA graphs
    ops.py         the process that checks every op
    running.py     commands with a time limit and a log
    compiling.py   a process that notes what Triton compiles
    ab.py          the decode rate with and without dependent launches, CUDA graphs and prefetched weights, in turn
    bits.py        products repeated beside another kernel, and rows alone and among others
    report.py      bench/results/<gpu>/report.md, and its archive
    pack.py        what would travel to another machine

Only facts.py, ops.py, ab.py and bits.py import torch: the parts run in processes of their own.
"""
