"""Evaluates a plan, searches meshes, reshapes, recomputes and suggests.

The planner finds the best plan. It does not need torch.
"""
