"""The cost of one layer and one link, and the files that hold costs. No torch."""
