"""Everything that needs a GPU: `python -m benchmarks.gpu` (`make gpu`).

Each part is also a command of its own: `python -m benchmarks.gpu.NAME [--json] [--dry]`.

split        the backward in two parts against one, and against plain torch, eager and compiled
slices       schedules on slices of one GPU, beside torch's orders and torch's runtime
sparse       pruned linears (CSR) against dense ones: the break-even sparsity
attention    hash-sparse attention (Triton) against torch's SDPA, by length
cases        a large GPT on slices: freezing, sparse attention and pruning, static against balanced
memory       two ranks that share the GPU: peak memory beside the account, a move of layers
profile      `dynmo profile` on slices, and `dynmo plan` on what it measured
"""
