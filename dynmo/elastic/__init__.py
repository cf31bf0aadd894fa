"""Ranks that join a running run, and ranks that leave it.

    newcomer           -> join request -> rank 0 -> grant -> a rank of the next generation
    rank that leaves   -> rank 0 -> manager: its resources are free

`join_requests.py` and `grant.py` are the messages, and `rank_source.py` joins them with a manager.
`managers/` has the resource managers, and `launcher/` starts and supervises the processes.
"""
