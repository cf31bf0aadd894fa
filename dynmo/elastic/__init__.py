"""Ranks that join a running run, and ranks that leave it.

    newcomer           -> asks in the store -> rank 0 -> lets it in -> a rank of the next generation
    rank that leaves   -> rank 0 -> manager: its resources are free

`newcomers.py` is the entrance, on rank 0, and `newcomer.py` the side of a process that waits there.
`managers/` has the resource managers. `launcher/` starts and supervises the processes, and
`launch.py` has what it and rank 0 tell each other.
"""
