"""Which plan is best: evaluates one plan, searches meshes, reshapes, recomputes and suggests. No
torch."""
