"""Groups of ranks, process groups, channels, launching and rendezvous."""
