"""Faults that are drawn by a seed, in runs of `dynmo train`: `python -m benchmarks.faults`.

draws      the runs, and what strikes where
inject     strikes in the process of a rank
forks      starts launchers and ranks as forks, because importing torch takes seconds
judge      what came of a run
tables     the figures of all draws
hosts      network namespaces as hosts
steady     a long run with a kill at every 100th step
"""
