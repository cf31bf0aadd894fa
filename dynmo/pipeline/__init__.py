"""`Pipeline`, the class that users call, and what keeps its schedule and placement up to date."""
