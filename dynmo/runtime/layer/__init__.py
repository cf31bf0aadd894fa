"""F, B and W of one layer, stages, accumulation, output cache and buffers."""
