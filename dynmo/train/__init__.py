"""The trainer: loop, loader, resume, dry run, profiling and trace."""
