"""`Pipeline`, the class that users call, and the parts behind it."""
