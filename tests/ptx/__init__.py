"""Specker's ops in the PTX simulator (`simulator/`): their compiled kernels are executed in numpy.

launches.py       how specker's launchers run in the simulator; which parameters no kernel writes
ops.py, rounds.py the ops' cases; checks.py: values, invariance; counting.py: counters
__main__.py       the command; processes.py: its processes; plugin.py: the kernels' own tests on PTX
"""
