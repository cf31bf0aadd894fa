"""A model is a list of layers, embedding and head included; a layer is the smallest thing that
moves."""
