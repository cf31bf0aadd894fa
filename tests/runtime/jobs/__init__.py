"""Jobs of the pool's ranks for the tests of the runtime.

There is one file for each tested file.

Each function takes the job's world first. Arguments and results are JSON.
"""
