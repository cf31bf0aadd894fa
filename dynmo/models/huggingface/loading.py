"""The values of layers: read from files, or drawn."""
