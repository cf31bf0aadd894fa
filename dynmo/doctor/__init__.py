"""Looks at a machine before a run does: packages, network, devices, memory, disk and ranks."""
