"""Models: each is a list of layers, embedding and head included.

A layer is the smallest thing that moves.
"""
