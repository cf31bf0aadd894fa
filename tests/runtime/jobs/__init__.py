"""What the pool's ranks run for the tests of the runtime, a file for a file of it. Each function
takes the job's world first; arguments and results are JSON."""
