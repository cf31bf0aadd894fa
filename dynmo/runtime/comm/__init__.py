"""World, process groups, channels, launching and rendezvous."""
