"""Benchmarks for a machine with a CUDA device: `python -m benchmarks.gpu.NAME [--json]`. UNPROVEN: none has run on a device yet.

split        a GPT stage: the backward in two parts against one, and against plain torch; eager and compiled
attention    hash-sparse attention (Triton) against torch's SDPA, by length: what it takes, and from which length it wins
sparse       pruned linears (CSR) against dense ones: from which sparsity they win
slices       a pipeline on slices of one GPU: schedules against each other, the simulator, and the whole GPU without a pipeline
"""
