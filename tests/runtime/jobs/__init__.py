"""Jobs of the pool's ranks, a file for each tested file. The world comes first."""
