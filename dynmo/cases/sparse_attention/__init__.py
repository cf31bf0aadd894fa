from dynmo.cases.sparse_attention.options import SparseAttention as SparseAttention
